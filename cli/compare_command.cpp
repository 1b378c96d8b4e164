// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/terminal.h"
#include "harness/compare.h"

namespace tandem {
namespace {

struct CompareArguments {
  std::string a, json;
  std::vector<std::string> others;
  double threshold_percent = 5;
  bool machines = false;
};

int compare_action(const CompareArguments& arguments) {
  require_writable(arguments.json, "--json");
  const CompareOptions options{.threshold = arguments.threshold_percent / 100, .machines = arguments.machines};
  const ResultFile a = read_result_file(arguments.a);
  std::vector<Comparison> comparisons;
  for (const std::string& other : arguments.others) {
    comparisons.push_back(compare(a, read_result_file(other), arguments.a, other, options));
  }
  const bool pair = comparisons.size() == 1;
  if (arguments.json != "-") {
    fmt::print("{}", pair ? render(comparisons.front(), output_style()) : render(comparisons, output_style()));
  }
  if (!arguments.json.empty()) {
    write_output(arguments.json, pair ? to_json(comparisons.front()) : to_json(comparisons));
  }
  return exit_status(comparisons);
}

}  // namespace

void add_compare_command(CommandLine& line) {
  auto* command = line.app.add_subcommand(
      "compare", "Compare result files with the first one; exit 1: worse, 3: too noisy to tell or not comparable");
  const auto arguments = std::make_shared<CompareArguments>();
  command->add_option("A", arguments->a, "result file of tandem run --out")->required();
  command->add_option("B", arguments->others, "result files that are compared with A, one or more")->required();
  command->add_option("--threshold", arguments->threshold_percent, "change that matters, in percent")
      ->capture_default_str()
      ->check(number_between(0, 1000));
  command->add_flag("--machines", arguments->machines,
                    "the files are of different machines: link, backend, threads of a rank and overlap may differ");
  command->add_option("--json", arguments->json, "write the comparison as JSON; - is standard output");
  command->footer(
      "Example (1: worse, 3: too noisy to tell):\n"
      "  tandem run data_parallel/ranks2 --out build/a.json\n"
      "  tandem run data_parallel/ranks2 --out build/b.json\n"
      "  tandem compare build/a.json build/b.json --threshold 10");
  command->callback([&line, arguments] { line.action = [arguments] { return compare_action(*arguments); }; });
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/terminal.h"
#include "harness/compare.h"

namespace tandem {
namespace {

struct CompareArguments {
  std::string a, b, json;
  double threshold_percent = 5;
};

int compare_action(const CompareArguments& arguments) {
  require_writable(arguments.json, "--json");
  const Comparison comparison = compare(read_result_file(arguments.a), read_result_file(arguments.b), arguments.a, arguments.b,
                                        arguments.threshold_percent / 100);
  if (arguments.json != "-") fmt::print("{}", render(comparison, output_style()));
  if (!arguments.json.empty()) write_output(arguments.json, to_json(comparison));
  return comparison.exit_status();
}

}  // namespace

void add_compare_command(CommandLine& line) {
  auto* command =
      line.app.add_subcommand("compare", "Compare two result files; exit 1: worse, 3: too noisy to tell or not comparable");
  const auto arguments = std::make_shared<CompareArguments>();
  command->add_option("A", arguments->a, "result file of tandem run --out")->required();
  command->add_option("B", arguments->b, "result file that is compared with A")->required();
  command->add_option("--threshold", arguments->threshold_percent, "change that matters, in percent")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1000.0));
  command->add_option("--json", arguments->json, "write the comparison as JSON; - is standard output");
  command->footer(
      "Example (after: tandem run data_parallel/ranks2 --out build/a.json; the same again to build/b.json):\n"
      "  tandem compare build/a.json build/b.json --threshold 10");
  command->callback([&line, arguments] { line.action = [arguments] { return compare_action(*arguments); }; });
}

}  // namespace tandem

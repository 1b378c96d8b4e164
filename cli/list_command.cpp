// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/output.h"
#include "core/cluster.h"
#include "core/io/atomic_file.h"
#include "core/model_shape.h"
#include "core/pitfall.h"
#include "core/world_settings.h"
#include "harness/registry.h"
#include "harness/text_table.h"
#include "optimized/comm/world.h"
#include "optimized/scaling/published.h"

namespace tandem {
namespace {

std::string as_json(const CaseList& cases) {
  nlohmann::json json = {{"schema_version", 1},
                         {"suites", suite_names(cases)},
                         {"models", shipped_models()},
                         {"clusters", shipped_clusters()},
                         {"published", published_sets()},
                         {"transports", transports()},
                         {"links", shipped_link_profiles()}};
  for (const Case& entry : cases) {
    json["cases"].push_back({{"case", entry.name},
                             {"suite", entry.suite},
                             {"criterion", std::string(name(entry.criterion))},
                             {"quick", entry.quick},
                             {"ranks", entry.plan.parallel.world_size()},
                             {"summary", entry.summary}});
  }
  for (const Pitfall pitfall : all_pitfalls()) json["pitfalls"].push_back(std::string(name(pitfall)));
  return json.dump(2) + "\n";
}

// One test per quick case, labelled with its suite, as a file that CTest includes.
std::string as_ctest(const CaseList& cases, const std::string& program) {
  std::string text;
  for (const Case& entry : cases) {
    if (!entry.quick) continue;
    text += fmt::format("add_test([[case/{0}]] [[{1}]] run [[{0}]] --without-peak)\n", entry.name, program);
    text += fmt::format(
        "set_tests_properties([[case/{}]] PROPERTIES LABELS {} TIMEOUT 300 {} SKIP_REGULAR_EXPRESSION \"0 passed, 0 failed, 1 "
        "skipped\")\n",
        entry.name, entry.suite, entry.timed ? "RUN_SERIAL TRUE" : "");
  }
  return text;
}

int list_action(const CommandLine& line, const std::string& json_file, const std::string& ctest_file) {
  const CaseList cases = all_cases(line.suites);
  if (!ctest_file.empty()) {
    write_output(ctest_file, as_ctest(cases, std::filesystem::read_symlink("/proc/self/exe").string()));
    return kGood;
  }
  if (!json_file.empty()) {
    write_output(json_file, as_json(cases));
    return kGood;
  }
  for (const std::string& suite : suite_names(cases)) {
    fmt::print("suite {}\n", suite);
    for (const Case& entry : cases) {
      if (entry.suite == suite)
        fmt::print("  {:<40} {:<12} {}{}\n", entry.name, name(entry.criterion), entry.summary, entry.quick ? "" : " [full]");
    }
  }
  fmt::print("pitfalls\n");
  for (const Pitfall pitfall : all_pitfalls()) fmt::print("  {}\n", name(pitfall));
  fmt::print("models\n");
  for (const std::string& model : shipped_models()) {
    fmt::print("  {:<17} {} parameters\n", model, human_count(num_parameters(read_model_shape(model))));
  }
  fmt::print("clusters\n");
  for (const std::string& cluster : shipped_clusters()) fmt::print("  {:<17} {}\n", cluster, read_cluster(cluster).description);
  fmt::print("published\n");
  for (const std::string& set : published_sets()) fmt::print("  {}\n", set);
  fmt::print("transports\n");
  for (const std::string& transport : transports()) fmt::print("  {}\n", transport);
  fmt::print("links\n");
  for (const std::string& link : shipped_link_profiles()) fmt::print("  {:<14} {}\n", link, read_link_profile(link).description);
  return kGood;
}

}  // namespace

void add_list_command(CommandLine& line) {
  auto* command =
      line.app.add_subcommand("list", "Suites, cases, pitfalls, models, clusters, published tables, transports and links");
  const auto json_file = std::make_shared<std::string>();
  const auto ctest_file = std::make_shared<std::string>();
  command->add_option("--json", *json_file, "write JSON to this file; - is standard output");
  command->add_option("--ctest", *ctest_file, "write the quick cases as CTest entries (used by the build)");
  command->footer("Example:\n  tandem list --json -");
  command->callback([&line, json_file, ctest_file] {
    line.action = [&line, json_file, ctest_file] { return list_action(line, *json_file, *ctest_file); };
  });
}

}  // namespace tandem

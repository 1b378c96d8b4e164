// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

constexpr std::size_t kCasesInAPart = 24;

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

// Quick cases as a file that CTest includes, labelled with their suites: each a test of its own or, with a folder for their JUnit
// reports, many in a process, since starting one takes as long as a short case. Timed ones run while nothing else does.
std::string as_ctest(const CaseList& cases, const std::string& program, const std::string& reports) {
  std::string text;
  const auto add = [&](const std::string& test, const std::string& suite, const std::string& names, bool timed, int seconds) {
    text += fmt::format("add_test([[{}]] [[{}]] run {}--without-peak", test, program, names);
    if (!reports.empty()) text += fmt::format(" --junit [[{}/{}.xml]]", reports, test);
    text += fmt::format(")\nset_tests_properties([[{}]] PROPERTIES LABELS {} TIMEOUT {}{}", test, suite, seconds,
                        timed ? " RUN_SERIAL TRUE" : "");
    if (reports.empty()) text += " SKIP_REGULAR_EXPRESSION \"0 passed, 0 failed, 1 skipped\"";
    text += ")\n";
  };
  std::map<std::pair<std::string, bool>, std::vector<std::string>> groups;
  for (const Case& entry : cases) {
    if (!entry.quick) continue;
    if (reports.empty()) {
      add("case/" + entry.name, entry.suite, fmt::format("[[{}]] ", entry.name), entry.timed, 300);
    } else {
      groups[{entry.suite, entry.timed}].push_back(entry.name);
    }
  }
  for (const auto& [key, names] : groups) {
    const auto& [suite, timed] = key;
    const std::size_t parts = (names.size() + kCasesInAPart - 1) / kCasesInAPart;
    for (std::size_t part = 0; part < parts; ++part) {
      std::string chosen;
      for (std::size_t i = part; i < names.size(); i += parts) chosen += fmt::format("[[{}]] ", names[i]);
      add(fmt::format("{}_{}cases_{}_of_{}", suite, timed ? "timed_" : "", part + 1, parts), suite, chosen, timed, 600);
    }
  }
  return text;
}

int list_action(const CommandLine& line, const std::string& json_file, const std::string& ctest_file,
                const std::string& reports) {
  const CaseList cases = all_cases(line.suites);
  if (!ctest_file.empty()) {
    write_output(ctest_file, as_ctest(cases, std::filesystem::read_symlink("/proc/self/exe").string(), reports));
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
  const auto reports = std::make_shared<std::string>();
  command->add_option("--json", *json_file, "write JSON to this file; - is standard output");
  command->add_option("--ctest", *ctest_file, "write the quick cases as CTest entries (used by the build)");
  command
      ->add_option("--ctest-reports", *reports, "with --ctest: many cases in a process, which writes JUnit XML into this folder")
      ->needs("--ctest");
  command->footer("Example:\n  tandem list --json -");
  command->callback([&line, json_file, ctest_file, reports] {
    line.action = [&line, json_file, ctest_file, reports] { return list_action(line, *json_file, *ctest_file, *reports); };
  });
}

}  // namespace tandem

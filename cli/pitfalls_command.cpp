// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/job.h"
#include "cli/output.h"
#include "cli/run_options.h"
#include "cli/terminal.h"
#include "core/io/atomic_file.h"
#include "core/nearest_name.h"
#include "harness/pitfall_report.h"
#include "harness/registry.h"
#include "suites/pitfalls.h"

namespace tandem {
namespace {

struct PitfallArguments {
  std::vector<std::string> names;
  bool list = false;
  RunOptions options;
  std::string json;
};

std::vector<PitfallInfo> chosen(const std::vector<std::string>& names) {
  std::vector<PitfallInfo> all = known_pitfalls();
  if (names.empty()) return all;
  for (const std::string& wanted : names) {
    if (find_pitfall(wanted)) continue;
    std::vector<std::string> known;
    for (const PitfallInfo& info : all) known.emplace_back(name(info.pitfall));
    const std::optional<std::string> nearest = nearest_name(wanted, known);
    throw InputError(fmt::format("there is no pitfall '{}'{} (tandem pitfalls --list shows them)", wanted,
                                 nearest ? fmt::format(", did you mean '{}'?", *nearest) : ""));
  }
  std::erase_if(
      all, [&](const PitfallInfo& info) { return std::find(names.begin(), names.end(), name(info.pitfall)) == names.end(); });
  return all;
}

int list_action(const std::vector<PitfallInfo>& pitfalls) {
  for (const PitfallInfo& info : pitfalls) {
    fmt::print("{:<40} {:<6} {}\n{:47} modelled on: {}\n", name(info.pitfall), info.fault_class, info.what, "", info.modelled_on);
  }
  return kGood;
}

int pitfalls_action(const CommandLine& line, const PitfallArguments& arguments) {
  const std::vector<PitfallInfo> pitfalls = chosen(arguments.names);
  if (arguments.list) return list_action(pitfalls);
  const RunContext context = to_context(arguments.options);
  const Job job(context.world);
  job.on_leader([&] { require_writable(arguments.json, "--json"); });
  CaseList cases = all_cases(line.suites);
  check_catchers(pitfalls, cases);
  const bool over_processes = context.world.transport != "threads";
  if (over_processes) skip_what_does_not_fit(cases, job);
  std::atomic<bool> stop = false;
  ProgressLine progress;
  std::vector<PitfallOutcome> outcomes;
  for (const PitfallInfo& info : pitfalls) {
    if (job.leads()) {
      progress.show(static_cast<std::int64_t>(outcomes.size()), static_cast<std::int64_t>(pitfalls.size()),
                    std::string(name(info.pitfall)));
    }
    RunnerOptions options;
    options.context = context;
    options.context.pitfalls = info.switched_on();
    options.interrupted = over_processes ? &stop : &line.stop;
    if (over_processes) {
      options.agree = [&](CaseResult& result) {
        if (line.stop) stop = true;
        job.agree(result, stop);
      };
    }
    const RunOutcome outcome = run_cases(select_cases(cases, info.patterns(), Tier::full), options);
    if (outcome.interrupted) break;
    outcomes.push_back(assess(info, outcome.results));
  }
  progress.clear();
  const int status = all_caught(outcomes) ? kGood : kCheckFailed;
  if (!job.leads()) return job.agree_on_status(status);
  if (arguments.json != "-") fmt::print("{}", render(outcomes, output_style()));
  if (!arguments.json.empty()) write_output(arguments.json, to_json(outcomes));
  if (outcomes.size() < pitfalls.size()) {
    fmt::print(stderr, "tandem: interrupted after {} of {} pitfalls\n", outcomes.size(), pitfalls.size());
    return job.agree_on_status(kInterrupted);
  }
  return job.agree_on_status(status);
}

}  // namespace

void add_pitfalls_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("pitfalls", "Plant known faults one at a time and demand that a suite notices each");
  const auto arguments = std::make_shared<PitfallArguments>();
  command->add_option("NAME", arguments->names, "pitfalls; all without");
  command->add_flag("--list", arguments->list, "say what each is, run nothing");
  add_run_options(*command, arguments->options);
  command->add_option("--json", arguments->json, "write the outcome as JSON; - is standard output");
  command->footer("Example:\n  tandem pitfalls mean_of_rank_means gelu_with_erf");
  command->callback([&line, arguments] { line.action = [&line, arguments] { return pitfalls_action(line, *arguments); }; });
}

}  // namespace tandem

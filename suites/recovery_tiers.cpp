// SPDX-License-Identifier: Apache-2.0
// Restarts from the memory of the machine: no disk is read, and less is done again.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "suites/recovery_cases.h"
#include "suites/scratch_folder.h"
#include "suites/timing.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Disk after every fifth step, memory after every second.
RecoveryScript tier_script(const ParallelVariant& variant, const RunContext& context) {
  RecoveryScript script = recovery_script(variant, context);
  script.inputs.steps = 12;
  script.checkpoint_every_steps = 5;
  script.memory_every_steps = 2;
  return script;
}

Property restarts_from(const RecoveryRun& run, const std::string& tier, double expected) {
  double count = 0;
  for (const RecoveryAttempt& attempt : run.attempts) {
    const bool is_counted = tier == "memory" ? attempt.from_memory : attempt.from_disk;
    count += is_counted ? 1 : 0;
  }
  return {"restarts from " + tier, count, Relation::equal, expected, "the newest state that is left, memory first", -1, ""};
}

Case tier_case(const std::string& name, const std::string& summary, const ParallelVariant& variant,
               const std::function<std::vector<Property>(const RunContext&, const fs::path&)>& properties) {
  Case result = recovery_case("memory/" + name, summary, variant);
  result.execute = [properties](const RunContext& context) {
    const ScratchFolder scratch("recovery-memory");
    CaseEvidence evidence;
    evidence.properties = properties(context, scratch.path());
    return evidence;
  };
  return result;
}

void add(std::vector<Property>& properties, const std::vector<Property>& more) {
  properties.insert(properties.end(), more.begin(), more.end());
}

// Both are what the ledger of the reference says; so is their ratio.
Case restart_case(const ParallelVariant& variant) {
  return tier_case(
      "restart", "killed twice: no disk is read, and fewer steps are lost than with checkpoints alone", variant,
      [variant](const RunContext& context, const fs::path& folder) {
        RecoveryScript script = tier_script(variant, context);
        script.faults = {"kill@step=5,rank=1", "kill@step=10"};
        const ExpectedFailures failures{{4, 9}};
        const RecoveryRun run = run_supervised(script, context, folder / "memory");
        std::vector<Property> properties = follows_ledger(script, failures, run);
        properties.push_back(restarts_from(run, "memory", 2));
        properties.push_back(restarts_from(run, "disk", 0));
        script.memory_every_steps = 0;
        const RecoveryRun disk = run_supervised(script, context, folder / "disk");
        add(properties, follows_ledger(script, failures, disk));
        add(properties, same_as_undisturbed(run_undisturbed(script, context, folder / "undisturbed"), run));
        properties.push_back({"lost_steps over those of checkpoints alone",
                              static_cast<double>(run.report.lost_steps) / static_cast<double>(disk.report.lost_steps),
                              Relation::at_most, 1.0 / 8, "4 - 4 and 9 - 8 steps, where the disk has 0 and 5: 1 of 8", -1, ""});
        const bool is_left = fs::exists(folder / "memory" / "memory") && !fs::is_empty(folder / "memory" / "memory");
        properties.push_back(
            {"left in memory", is_left ? 1.0 : 0.0, Relation::equal, 0.0, "a run that is over cleans up", -1, ""});
        return properties;
      });
}

// Two nodes of two ranks, each lost once with what it had in memory.
Case node_case(const ParallelVariant& variant) {
  return tier_case("node_lost", "each node is lost once with its memory: the neighbour has a copy", variant,
                   [variant](const RunContext& context, const fs::path& folder) {
                     RecoveryScript script = tier_script(variant, context);
                     script.ranks_per_node = 2;
                     script.faults = {"kill@step=8,rank=2", "kill@step=10,rank=1"};
                     script.between = [](std::uint64_t attempt, const fs::path& memory) {
                       const fs::path node = memory / fmt::format("node-{}", attempt % 2);
                       TANDEM_CHECK(fs::remove_all(node) > 0, "a node without memory is no loss");
                     };
                     const RecoveryRun run = run_supervised(script, context, folder / "run");
                     std::vector<Property> properties = follows_ledger(script, {{7, 9}}, run);
                     properties.push_back(restarts_from(run, "memory", 2));
                     properties.push_back(restarts_from(run, "disk", 0));
                     add(properties, same_as_undisturbed(run_undisturbed(script, context, folder / "undisturbed"), run));
                     return properties;
                   });
}

Case all_lost_case(const ParallelVariant& variant) {
  return tier_case("all_lost", "the memory is gone with the workers: the disk is still there", variant,
                   [variant](const RunContext& context, const fs::path& folder) {
                     RecoveryScript script = tier_script(variant, context);
                     script.faults = {"kill@step=9,rank=1"};
                     script.between = [](std::uint64_t, const fs::path& memory) { fs::remove_all(memory); };
                     const RecoveryRun run = run_supervised(script, context, folder / "run");
                     ExpectedFailures failures{{8}};
                     failures.memory_survives = false;
                     std::vector<Property> properties = follows_ledger(script, failures, run);
                     properties.push_back(restarts_from(run, "disk", 1));
                     add(properties, same_as_undisturbed(run_undisturbed(script, context, folder / "undisturbed"), run));
                     return properties;
                   });
}

// ---- what it saves in time

struct RestartTimes {
  std::vector<double> first_step, behind;  // seconds; of each failure
};

// 108 MB of state; a checkpoint after eight steps, killed in the sixteenth.
RestartTimes measure_restarts(const RunContext& context, const ParallelVariant& variant, bool memory, const fs::path& folder) {
  RestartTimes times;
  for (int turn = 0; turn < 3; ++turn) {
    RecoveryScript script = recovery_script(variant, context);
    script.inputs.steps = 18;
    script.checkpoint_every_steps = 8;
    script.checkpoint_async = script.durable = true;
    script.memory_every_steps = memory ? 1 : 0;
    script.faults = {"kill@step=16"};
    const RecoveryRun run = run_supervised(script, context, folder / std::to_string(turn));
    const Incident& failure = run.report.incidents.front();
    times.first_step.push_back(failure.seconds_to_first_new_step.value_or(std::nan("")));
    times.behind.push_back(run.report.down_seconds + run.report.redone_seconds);
  }
  return times;
}

double middle(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

Case time_case() {
  ParallelVariant variant{.rows = 4, .layers = 3, .dropout = 0.0};
  variant.hidden = 480;
  variant.mlp_hidden = 1920;
  variant.heads = 8;
  Case result =
      recovery_case("time/memory", "until a run that was killed is where it was: from memory, and from the disk", variant);
  result.quick = false;
  result.timed = true;
  result.unavailable = [](const RunContext&) { return too_busy_to_time(); };
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("recovery-time");
    const RestartTimes disk = measure_restarts(context, variant, false, scratch.path() / "disk");
    const RestartTimes memory = measure_restarts(context, variant, true, scratch.path() / "memory");
    CaseEvidence evidence;
    evidence.properties = {
        {"time_until_it_is_where_it_was, memory over disk", middle(memory.behind) / middle(disk.behind), Relation::at_most, 0.7,
         fmt::format("{:.0f} ms against {:.0f} ms of which the first new step took {:.0f} and {:.0f} ms; seven steps need not be "
                     "done again. Medians of three",
                     1e3 * middle(memory.behind), 1e3 * middle(disk.behind), 1e3 * middle(memory.first_step),
                     1e3 * middle(disk.first_step)),
         -1, ""}};
    return evidence;
  };
  return result;
}

}  // namespace

void add_recovery_tier_cases(CaseList& cases) {
  ParallelVariant variant{.degrees = {.data = 4}};
  variant.micro_batches = 2;
  cases.push_back(restart_case(variant));
  ParallelVariant half = variant;
  half.precision = "fp16";
  half.zero_stage = 1;
  half.loss_scale.growth_interval = 3;
  cases.push_back(node_case(half));
  cases.push_back(all_lost_case({.degrees = {.data = 2}}));
  cases.push_back(time_case());
}

}  // namespace tandem

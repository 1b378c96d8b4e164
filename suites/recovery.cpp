// SPDX-License-Identifier: Apache-2.0
// Runs in which ranks die, hang and lag: they go on by themselves, and end as if nothing had been.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "suites/recovery_cases.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

constexpr double kHangSeconds = 0.4;  // limit in train and data; twice as long for what works on the disk

ParallelVariant on_data_ranks(int ranks) {
  ParallelVariant variant{.degrees = {.data = ranks}};
  variant.micro_batches = 2;
  return variant;
}

struct FaultCase {
  std::vector<std::string> faults;
  ExpectedFailures expected;
  bool async = false;
  std::string codec = "none";
};

void add_all(std::vector<Property>& properties, const std::vector<Property>& more) {
  properties.insert(properties.end(), more.begin(), more.end());
}

Property incidents(const RecoveryRun& run, const std::string& kind, double expected, const std::string& why) {
  return {"incidents of kind " + kind, count_incidents(run, kind), Relation::equal, expected, why, -1, ""};
}

// Faults, the run without them, and what both have in common.
Case fault_case(const std::string& name, const std::string& summary, const ParallelVariant& variant, const FaultCase& faults,
                const std::function<std::vector<Property>(const RecoveryRun&)>& more = {}) {
  Case result = recovery_case(name, summary, variant);
  result.plan.compression.codec = faults.codec;
  result.execute = [variant, faults, more](const RunContext& context) {
    const ScratchFolder scratch("recovery");
    RecoveryScript script = recovery_script(variant, context);
    script.inputs.plan.compression.codec = faults.codec;
    script.faults = faults.faults;
    script.checkpoint_async = faults.async;
    const RecoveryRun run = run_supervised(script, context, scratch.path() / "run");
    CaseEvidence evidence;
    evidence.properties = follows_ledger(script, faults.expected, run);
    add_all(evidence.properties, same_as_undisturbed(run_undisturbed(script, context, scratch.path() / "undisturbed"), run));
    if (more) add_all(evidence.properties, more(run));
    return evidence;
  };
  return result;
}

Case kill_case(const std::string& name, const ParallelVariant& variant, const std::string& codec = "none") {
  const int last = plan_of(variant).parallel.world_size() - 1;
  return fault_case("kill/" + name, "ranks are killed one after the other", variant,
                    {{"kill@step=5", fmt::format("kill@step=6,rank={}", last / 2), fmt::format("kill@step=9,rank={}", last)},
                     {{4, 5, 8}},
                     false,
                     codec},
                    [](const RecoveryRun& run) {
                      return std::vector<Property>{incidents(run, "exit", 3, "each death is an incident, and nothing else is"),
                                                   incidents(run, "resumed", 3, "and so is each first new step")};
                    });
}

// ---- hangs

// Data that does not come, once.
class StuckSource final : public WrappedSource {
 public:
  StuckSource(std::shared_ptr<const BatchSource> inner, std::int64_t step)
      : WrappedSource(*inner), inner_(std::move(inner)), step_(step) {}
  // Whether anybody waited for it.
  [[nodiscard]] bool release() const {
    const std::scoped_lock lock(mutex_);
    changed_.notify_all();
    return was_asked_ && !std::exchange(released_, true);
  }

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    std::unique_lock lock(mutex_);
    if (step == step_ && !std::exchange(was_asked_, true)) {
      changed_.wait(lock, [this] { return released_; });
      throw FaultStruck("the data never came");
    }
    lock.unlock();
    return inner_->training_rows(step, global_rows, rows);
  }

 private:
  std::shared_ptr<const BatchSource> inner_;
  std::int64_t step_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable bool released_ = false, was_asked_ = false;
};

Property named(const RecoveryRun& run, int rank, const std::string& phase) {
  return {fmt::format("hung rank {} in {}", rank < 0 ? "(several)" : std::to_string(rank), phase),
          count_incidents(run, "hung", rank, phase),
          Relation::equal,
          1.0,
          "the one that others wait for, where it stands",
          -1,
          ""};
}

Property latest_detection(const RecoveryRun& run) {
  double latest = 0;
  std::string each;
  for (const Incident& incident : run.report.incidents) {
    if (incident.kind != "hung") continue;
    const double seconds = incident.detected_after_seconds.value_or(std::nan(""));
    if (!(seconds <= latest)) latest = seconds;
    each += fmt::format("{}{} {:.2f} s", each.empty() ? "" : ", ", incident.phase, seconds);
  }
  return {
      "latest_detection_seconds",
      latest,
      Relation::at_most,
      20 * kHangSeconds,
      fmt::format("after the last sign of progress: {}; limits are {} s and, on the disk, twice that, and the rest is for a busy "
                  "machine: recovery/detector/traces judges the time",
                  each, kHangSeconds),
      -1,
      ""};
}

Case hang_case() {
  const ParallelVariant variant = on_data_ranks(3);
  Case result =
      recovery_case("hang/named", "hangs in a step, in a save, in a restore and in the data: each rank and phase named", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("recovery");
    RecoveryScript script = recovery_script(variant, context);
    const RecoveryRun undisturbed = run_undisturbed(script, context, scratch.path() / "undisturbed");
    script.detector.stall_seconds = {5 * kHangSeconds, 2 * kHangSeconds, kHangSeconds, kHangSeconds, 60, 2 * kHangSeconds, 0};
    script.faults = {"hang@step=5,rank=1", "hang@step=1,rank=2,during=restore", "hang@step=6,during=save"};
    const auto stuck = std::make_shared<StuckSource>(script.inputs.data, 1);
    script.inputs.data = stuck;
    script.at_kill = [stuck] { return stuck->release(); };
    const RecoveryRun run = run_supervised(script, context, scratch.path() / "run");
    CaseEvidence evidence;
    evidence.properties = follows_ledger(script, {{1, 4, 3, 6}}, run);
    evidence.properties.push_back(named(run, 1, "train"));
    evidence.properties.push_back(named(run, 2, "restore"));
    evidence.properties.push_back(named(run, 0, "checkpoint"));
    evidence.properties.push_back({"hangs in data", count_incidents(run, "hung", -1, "data"), Relation::equal, 1.0,
                                   "all ranks of a process stand there, none of them for another", -1, ""});
    evidence.properties.push_back(incidents(run, "hung", 4, "who waits is not to blame"));
    evidence.properties.push_back(latest_detection(run));
    add_all(evidence.properties, same_as_undisturbed(undisturbed, run));
    return evidence;
  };
  return result;
}

// ---- no false alarms

Case straggler_case() {
  ParallelVariant variant = on_data_ranks(3);
  Case result =
      recovery_case("straggler/named", "one rank works longer than the others: named with its phase, and left alone", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("recovery");
    RecoveryScript script = recovery_script(variant, context);
    script.inputs.steps = 20;
    script.checkpoint_every_steps = 0;
    const RecoveryRun undisturbed = run_undisturbed(script, context, scratch.path() / "undisturbed");
    script.faults = {"slow@step=3,rank=2,ms=40,count=17"};
    const RecoveryRun run = run_supervised(script, context, scratch.path() / "run");
    CaseEvidence evidence;
    evidence.properties = {{"slow rank 2 in train", count_incidents(run, "slow", 2, "train"), Relation::equal, 1.0,
                            "40 ms more of its own work in 17 steps in a row", -1, ""},
                           {"other ranks called slow", count_incidents(run, "slow") - count_incidents(run, "slow", 2),
                            Relation::equal, 0.0, "their steps take as long, but they wait", -1, ""},
                           {"attempts", static_cast<double>(run.attempts.size()), Relation::equal, 1.0,
                            "a straggler is no reason to restart", -1, ""}};
    add_all(evidence.properties, same_as_undisturbed(undisturbed, run));
    return evidence;
  };
  return result;
}

// Keeps processors busy while it lives.
class Load {
 public:
  explicit Load(int threads) {
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([](const std::stop_token& stop) {
        volatile double value = 1;
        while (!stop.stop_requested()) value = value * 1.0000001 + 1e-9;
      });
    }
  }

 private:
  std::vector<std::jthread> threads_;
};

Case load_case() {
  const ParallelVariant variant = on_data_ranks(4);
  Case result = recovery_case("no_alarm/load",
                              "more busy threads than processors, beats lost, a network that jitters: no alarm, no bit", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("recovery");
    RecoveryScript script = recovery_script(variant, context);
    script.inputs.steps = 16;
    script.checkpoint_every_steps = 6;
    const RecoveryRun undisturbed = run_undisturbed(script, context, scratch.path() / "undisturbed");
    script.detector = {};  // as shipped, but for the pace of the beats; eight looks a beat, of which twelve hear nothing
    script.detector.beat_seconds = 0.2;
    script.faults = {"jitter@step=4,rank=1,ms=2,count=8", "heartbeat@step=6,count=12"};
    const Load load(2);
    const RecoveryRun run = run_supervised(script, context, scratch.path() / "run");
    CaseEvidence evidence;
    evidence.properties = follows_ledger(script, {}, run);
    evidence.properties.push_back(incidents(run, "dead", 0, "no rank was"));
    evidence.properties.push_back(incidents(run, "hung", 0, "no rank did"));
    evidence.properties.push_back(incidents(run, "exit", 0, "no worker ended but the last"));
    add_all(evidence.properties, same_as_undisturbed(undisturbed, run));
    return evidence;
  };
  return result;
}

Case preempt_case() {
  const ParallelVariant variant = on_data_ranks(2);
  Case result = recovery_case("preempted", "a scheduler wants the machine back: saved, ended, and gone on with later", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("recovery");
    RecoveryScript script = recovery_script(variant, context);
    script.faults = {"preempt@step=5"};
    const RecoveryRun run = run_supervised(script, context, scratch.path() / "run");
    CaseEvidence evidence;
    evidence.properties = same_as_undisturbed(run_undisturbed(script, context, scratch.path() / "undisturbed"), run);
    const bool goes_on = run.attempts.size() == 2 && run.attempts[1].first_step == 5;
    evidence.properties.push_back({"goes_on_where_it_was", goes_on ? 1.0 : 0.0, Relation::equal, 1.0,
                                   "the step under way is finished, then the run is saved", -1, ""});
    evidence.properties.push_back({"steps_done", static_cast<double>(run.done.size()), Relation::equal,
                                   static_cast<double>(script.inputs.steps), "none twice", -1, ""});
    evidence.properties.push_back(incidents(run, "preempted", 1, "it says why it ended"));
    return evidence;
  };
  return result;
}

}  // namespace

Case recovery_case(const std::string& name, const std::string& summary, const ParallelVariant& variant) {
  return property_case("recovery", name, summary, model_of(variant), plan_of(variant));
}

RecoveryScript recovery_script(const ParallelVariant& variant, const RunContext& context) {
  RecoveryScript script;
  script.inputs = inputs_of(variant, context);
  script.inputs.steps = 10;
  script.inputs.schedule = {ScheduleKind::cosine, 3, 8, 0.25};
  script.detector.beat_seconds = 0.05;
  script.detector.stall_seconds = {60, 60, 60, 60, 60, 60, 0};
  return script;
}

void add_recovery_fault_cases(CaseList& cases) {
  cases.push_back(kill_case("data3", on_data_ranks(3)));
  const auto with = [](ParallelDegrees degrees) {
    ParallelVariant variant{.degrees = degrees};
    variant.micro_batches = 2;
    return variant;
  };
  cases.push_back(kill_case("tensor2/data2", with({.data = 2, .tensor = 2})));
  ParallelVariant pipeline = with({.pipeline = 2});
  pipeline.layers = 3;
  cases.push_back(kill_case("pipeline2", pipeline));
  ParallelVariant sharded = on_data_ranks(3);
  sharded.zero_stage = 3;
  cases.push_back(kill_case("zero3", sharded));
  ParallelVariant half = on_data_ranks(2);
  half.precision = "fp16";
  half.loss_scale.growth_interval = 2;
  cases.push_back(kill_case("fp16", half));
  cases.push_back(kill_case("top_k", on_data_ranks(3), "top_k"));
  cases.push_back(hang_case());
  cases.push_back(fault_case("second_fault", "a rank dies in a restore, and another one soon after it", on_data_ranks(3),
                             {{"kill@step=5", "kill@step=1,rank=1,during=restore", "kill@step=6,rank=2"}, {{4, 3, 5}}}));
  cases.push_back(fault_case("during_save", "a rank dies while its shard is written: the checkpoint before counts",
                             on_data_ranks(3), {{"kill@step=6,rank=1,during=save"}, {{6}, {1}}, true}));
  cases.push_back(fault_case("corrupt", "the newest checkpoint is damaged, then a rank dies: the one before counts",
                             on_data_ranks(3), {{"corrupt@step=8", "kill@step=8,rank=2"}, {{7}, {1}}}));
  cases.push_back(
      fault_case("disk_full", "a checkpoint cannot be written, later a rank dies: said, and the one before counts",
                 on_data_ranks(2), {{"disk_full@step=6", "kill@step=8,rank=1"}, {{7}, {1}}}, [](const RecoveryRun& run) {
                   return std::vector<Property>{{"checkpoint_problems", static_cast<double>(run.checkpoint_problems.size()),
                                                 Relation::equal, 1.0, "of the one that found no room", -1, ""}};
                 }));
  cases.push_back(straggler_case());
  cases.push_back(load_case());
  cases.push_back(preempt_case());
}

void add_recovery_cases(CaseList& cases) {
  add_recovery_fault_cases(cases);
  add_recovery_tier_cases(cases);
  add_recovery_shrink_cases(cases);
  add_recovery_detector_cases(cases);
  add_recovery_straggler_cases(cases);
  add_recovery_hang_cases(cases);
  add_recovery_time_cases(cases);
}

}  // namespace tandem

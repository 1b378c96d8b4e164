// SPDX-License-Identifier: Apache-2.0
#include "suites/recovery_run.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/file_operations.h"
#include "optimized/checkpoint/load.h"
#include "optimized/checkpoint/tiers.h"
#include "reference/recovery.h"
#include "suites/checkpoint_run.h"
#include "suites/one_step.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct Folders {
  fs::path checkpoints, memory;
};

// The operating system's, but nothing is made durable.
class UnsyncedFiles final : public WrappedFiles {
 public:
  void sync(int, const fs::path&) override {}
  void sync_folder(const fs::path&) override {}
};

TrainOptions train_options(const RecoveryScript& script, const RunContext& context, FileOperations& files,
                           const TrainingPlan& plan, const fs::path& checkpoints) {
  const PairInputs& inputs = script.inputs;
  TrainOptions options;
  options.config = run_config_of(inputs);
  options.config.plan = plan;
  options.config.optimizer = own_optimizer(inputs);
  options.config.evaluate_every_steps = 0;
  options.config.evaluate_batches = 1;
  options.config.checkpoint_every_steps = script.checkpoint_every_steps;
  options.config.checkpoint_keep = script.checkpoints_kept;
  options.config.checkpoint_async = script.checkpoint_async;
  options.config.memory_every_steps = script.memory_every_steps;
  options.config.anomaly.action = AnomalyAction::off;
  options.data = inputs.data.get();
  options.data_name = "synthetic";
  options.output = checkpoints;
  if (!script.durable) options.checkpoint_files = &files;
  options.poison = true;
  options.record_timeline = false;
  options.pitfalls = context.pitfalls;
  options.backend = context.backend;
  return options;
}

// One attempt, as a thread.
class ThreadWorker final : public Worker {
 public:
  ThreadWorker(TrainOptions options, std::function<bool()> at_kill, std::atomic<bool>& stop, RecoveryRun& run)
      : options_(std::move(options)), at_kill_(std::move(at_kill)), stop_(stop), run_(run), thread_([this] { work(); }) {}
  ~ThreadWorker() override { kill(); }
  ThreadWorker(const ThreadWorker&) = delete;
  ThreadWorker& operator=(const ThreadWorker&) = delete;

  std::optional<WorkerEnd> poll() override {
    const std::scoped_lock lock(mutex_);
    return end_;
  }
  void terminate() override { stop_ = true; }
  void kill() override {
    if (!thread_.joinable()) return;
    bool has_ended = false;
    {
      const std::scoped_lock lock(mutex_);
      killed_ = true;
      has_ended = end_.has_value();
    }
    if (!has_ended && !(at_kill_ && at_kill_())) options_.faults->release();
    thread_.join();
  }
  // Threads cannot be killed: one that nothing holds up is asked to end at its next step.
  [[nodiscard]] bool killed() {
    const std::scoped_lock lock(mutex_);
    return killed_;
  }

 private:
  void work() {
    options_.on_step = [this](std::int64_t step, const StepResult& result, double) {
      if (killed()) throw FaultStruck("killed by the supervisor");
      run_.done.push_back({run_.attempts.size() - 1, step, result});
    };
    options_.on_checkpoint_problem = [this](const std::string& problem) { run_.checkpoint_problems.push_back(problem); };
    WorkerEnd end;
    try {
      const TrainReport report = train(options_);
      end.status = report.interrupted ? 130 : 0;
      run_.last = report.checkpoint;
    } catch (const FaultStruck& struck) {
      end = {0, 9, struck.what()};
    } catch (const std::exception& error) {
      end = {4, 0, error.what()};
    }
    const std::scoped_lock lock(mutex_);
    end_ = end;
  }

  TrainOptions options_;
  std::function<bool()> at_kill_;
  std::atomic<bool>& stop_;
  RecoveryRun& run_;
  std::mutex mutex_;
  std::optional<WorkerEnd> end_;
  bool killed_ = false;
  std::thread thread_;
};

class ThreadLauncher final : public Launcher {
 public:
  ThreadLauncher(const RecoveryScript& script, const RunContext& context, Folders folders, FaultInjector& faults,
                 BoardHeartbeats& beats, std::atomic<bool>& stop, RecoveryRun& run)
      : script_(script),
        context_(context),
        folders_(std::move(folders)),
        faults_(faults),
        beats_(beats),
        stop_(stop),
        run_(run) {}
  ~ThreadLauncher() override { beats_.watch(nullptr, 0); }
  ThreadLauncher(const ThreadLauncher&) = delete;
  ThreadLauncher& operator=(const ThreadLauncher&) = delete;

  std::unique_ptr<Worker> start(const Attempt& attempt) override {
    const bool first = run_.attempts.empty();
    if (!first && script_.between) script_.between(attempt.number, folders_.memory);
    TrainOptions options = train_options(script_, context_, files_, attempt.plan, folders_.checkpoints);
    options.attempt = attempt.number;
    options.faults = &faults_;
    options.stop = &stop_;
    if (script_.memory_every_steps > 0) options.memory = place();
    RecoveryAttempt facts;
    if (!first) choose_restart(options, facts);
    facts.ranks = attempt.plan.parallel.world_size();
    facts.rows = attempt.plan.batch.rows;
    run_.attempts.push_back(facts);
    board_ = std::make_unique<ProgressBoard>(facts.ranks);
    options.board = board_.get();
    beats_.watch(board_.get(), attempt.number);
    return std::make_unique<ThreadWorker>(std::move(options), script_.at_kill, stop_, run_);
  }

  std::vector<int> lost_ranks() override {
    std::vector<int> lost = faults_.lost_ranks();  // since the run began
    lost.erase(lost.begin(), lost.begin() + static_cast<std::ptrdiff_t>(lost_before_));
    lost_before_ += lost.size();
    return lost;
  }

  std::optional<std::int64_t> newest_step() override {
    std::optional<std::int64_t> newest;
    if (script_.memory_every_steps > 0) newest = newest_in_memory(place());
    if (const std::optional<fs::path> folder = newest_on_disk()) {
      newest = std::max(newest.value_or(0), read_checkpoint_info(*folder).next_step);
    }
    return newest;
  }

 private:
  [[nodiscard]] MemoryTierPlace place() const { return {folders_.memory, script_.ranks_per_node}; }

  [[nodiscard]] std::optional<fs::path> newest_on_disk() const {
    try {
      return find_newest_checkpoint(folders_.checkpoints, nullptr);
    } catch (const InputError&) {
      return std::nullopt;  // none yet
    }
  }

  // The newest over both tiers, the memory first.
  void choose_restart(TrainOptions& options, RecoveryAttempt& facts) const {
    if (script_.memory_every_steps > 0) options.resume = assemble_from_memory(place(), {}, {}, context_.pitfalls);
    facts.from_memory = options.resume.has_value();
    const std::int64_t in_memory = options.resume ? read_checkpoint_info(*options.resume).next_step : -1;
    const std::optional<fs::path> on_disk = newest_on_disk();
    if (on_disk && read_checkpoint_info(*on_disk).next_step > in_memory) {
      options.resume = on_disk;
      facts.from_memory = false;
      facts.from_disk = true;
    }
    if (options.resume) facts.first_step = read_checkpoint_info(*options.resume).next_step;
  }

  const RecoveryScript& script_;
  const RunContext& context_;
  Folders folders_;
  FaultInjector& faults_;
  BoardHeartbeats& beats_;
  std::atomic<bool>& stop_;
  RecoveryRun& run_;
  UnsyncedFiles files_;
  std::unique_ptr<ProgressBoard> board_;
  std::size_t lost_before_ = 0;
};

SupervisorOptions supervisor_options(const RecoveryScript& script, const RunContext& context) {
  SupervisorOptions options;
  options.detector = script.detector;
  options.detector.ranks = script.inputs.plan.parallel.world_size();
  options.detector.pitfalls = context.pitfalls;
  options.plan = script.inputs.plan;
  options.model = script.inputs.model;
  options.max_restarts = script.max_restarts;
  options.backoff_seconds = options.longest_backoff_seconds = 0;
  options.shrink = script.shrink;
  options.pitfalls = context.pitfalls;
  return options;
}

void append(SupervisorReport& total, const SupervisorReport& part) {
  total.end = part.end;
  total.status = part.status;
  total.why = part.why;
  total.attempts += part.attempts;
  total.incidents.insert(total.incidents.end(), part.incidents.begin(), part.incidents.end());
  total.lost_steps += part.lost_steps;
  total.failures += part.failures;
  total.wall_seconds += part.wall_seconds;
  total.down_seconds += part.down_seconds;
  total.redone_seconds += part.redone_seconds;
  total.useful_seconds += part.useful_seconds;
}

}  // namespace

RecoveryRun run_supervised(const RecoveryScript& script, const RunContext& context, const fs::path& folder) {
  RecoveryRun run;
  const Folders folders{folder / "checkpoints", folder / "memory"};
  std::atomic<bool> stop{false};
  BoardHeartbeats beats(0);  // one whenever the supervisor looks: what it knows of a worker's end is exact
  FaultInjectorOptions faults;
  faults.faults = parse_faults(script.faults);
  faults.in_process = true;
  faults.checkpoints = folders.checkpoints;
  faults.lose_beats = [&beats](std::int64_t count) { beats.lose(count); };
  faults.preempt = [&stop] { stop = true; };
  FaultInjector injector(faults);
  IncidentLog log(folder);
  const std::atomic<bool> never{false};
  ThreadLauncher launcher(script, context, folders, injector, beats, stop, run);
  do {
    stop = false;
    append(run.report, supervise(supervisor_options(script, context), launcher, beats, log, never));
  } while (run.report.end == SupervisorReport::End::interrupted && std::cmp_less(run.attempts.size(), script.max_restarts));
  return run;
}

RecoveryRun run_undisturbed(const RecoveryScript& script, const RunContext& context, const fs::path& folder) {
  RecoveryRun run;
  UnsyncedFiles files;
  TrainOptions options = train_options(script, context, files, script.inputs.plan, folder / "checkpoints");
  options.on_step = [&run](std::int64_t step, const StepResult& result, double) { run.done.push_back({0, step, result}); };
  run.last = train(options).checkpoint;
  return run;
}

std::vector<Property> same_as_undisturbed(const RecoveryRun& undisturbed, const RecoveryRun& run) {
  std::vector<Property> properties;
  const auto last_step = static_cast<int>(undisturbed.done.size()) - 1;
  if (run.last.empty()) {
    properties.push_back({"fields_and_tensors_that_differ at the end", std::nan(""), Relation::equal, 0.0,
                          fmt::format("the run has no end: {}", run.report.why), last_step, ""});
  } else {
    properties.push_back(equal_on_disk("fields_and_tensors_that_differ at the end", reference::assemble(undisturbed.last),
                                       run.last, "parameters, moments, updates, schedule, loss scale, residuals, data",
                                       last_step));
  }
  std::vector<StepResult> expected;
  std::vector<StepResult> found;
  for (const DoneStep& done : run.done) {
    expected.push_back(undisturbed.done.at(static_cast<std::size_t>(done.step)).result);
    found.push_back(done.result);
  }
  properties.push_back({"steps_that_differ", steps_that_differ(expected, found), Relation::equal, 0.0,
                        "loss, norm, clipping, learning rate and loss scale of each step, whenever it was done", -1, ""});
  return properties;
}

std::vector<Property> follows_ledger(const RecoveryScript& script, const ExpectedFailures& expected, const RecoveryRun& run) {
  reference::FailureScript failures{
      script.inputs.steps, {{script.checkpoint_every_steps, true, expected.unusable}}, expected.during};
  if (script.memory_every_steps > 0) failures.tiers.push_back({script.memory_every_steps, expected.memory_survives});
  const reference::ExecutionLedger ledger = reference::execute(failures);
  double elsewhere = std::abs(static_cast<double>(std::ssize(ledger.steps) - std::ssize(run.done)));
  for (std::size_t i = 0; i < std::min(ledger.steps.size(), run.done.size()); ++i) {
    const bool same = ledger.steps[i].attempt == run.done[i].attempt && ledger.steps[i].step == run.done[i].step;
    elsewhere += same ? 0 : 1;
  }
  const bool finished = run.report.end == SupervisorReport::End::finished;
  return {{"ended_well", finished ? 1.0 : 0.0, Relation::equal, 1.0, fmt::format("by itself; {}", run.report.why), -1, ""},
          {"attempts", static_cast<double>(run.attempts.size()), Relation::equal, static_cast<double>(expected.during.size() + 1),
           "one more than there are failures", -1, ""},
          {"steps_done_in_another_order", elsewhere, Relation::equal, 0.0,
           "attempt and step of each, by the ledger: on from the newest state that is left", -1, ""},
          {"lost_steps", static_cast<double>(run.report.lost_steps),
           expected.memory_survives ? Relation::equal : Relation::at_most, static_cast<double>(ledger.lost_steps),
           "as the supervisor counts them: done, and done again; less where a restart begins further back than it could know", -1,
           ""}};
}

double count_incidents(const RecoveryRun& run, const std::string& kind, int rank, const std::string& phase) {
  double count = 0;
  for (const Incident& incident : run.report.incidents) {
    const bool fits = incident.kind == kind && (rank < 0 || incident.rank == rank) && (phase.empty() || incident.phase == phase);
    count += fits ? 1 : 0;
  }
  return count;
}

}  // namespace tandem

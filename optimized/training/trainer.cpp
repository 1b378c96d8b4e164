// SPDX-License-Identifier: Apache-2.0
#include "optimized/training/trainer.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "core/io/binary.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/load.h"
#include "optimized/checkpoint/timings.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/machine.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// The training loop of one rank. Rank 0 writes to `report`; the others only to their own element of its vectors.
class RankTrainer {
 public:
  RankTrainer(const TrainOptions& options, const std::optional<CheckpointInfo>& resumed, Prefetcher& batches, Communicator& comm,
              TrainReport& report)
      : options_(options),
        resumed_(resumed),
        batches_(batches),
        comm_(watched(comm)),
        report_(report),
        arena_({.poison = options.poison}),
        kernels_(make_kernels(options.config.plan, options.pitfalls)),
        engine_(context(), engine_options(options.config)),
        checkpointer_(checkpointer_options(options), engine_) {
    timeline_.set_enabled(options.record_timeline);
  }

  void run() {
    const std::int64_t first = start();
    for (std::int64_t step = first; step < options_.config.steps; ++step) {
      one_step(step);
      checkpointer_.poll();
      const std::int64_t done = step + 1;
      const bool last = done == options_.config.steps;
      if (last || due(done, options_.config.evaluate_every_steps)) evaluate(done);
      const bool stop = should_stop();
      if (last || stop || due(done, options_.config.checkpoint_every_steps)) save(done);
      if (stop && !last) {
        if (leads()) report_.interrupted = true;
        break;
      }
      report_checkpoints();
    }
    checkpointer_.finish();
    report_checkpoints();
    const auto rank = static_cast<std::size_t>(comm_.rank());
    report_.spans_by_rank[rank] = timeline_.spans();
    report_.ledgers[rank] = arena_.ledger();
    report_.host_ledgers[rank] = engine_.host_ledger();
    if (leads()) report_.kernels = kernels_->info();
  }

 private:
  // Before the engine splits it: the groups of each axis record where their world does.
  Communicator& watched(Communicator& comm) {
    comm.set_timeline(&timeline_);
    return comm;
  }
  [[nodiscard]] RankContext context() { return {&comm_, kernels_.get(), &arena_, &timeline_, options_.pitfalls}; }
  [[nodiscard]] bool leads() const { return comm_.rank() == 0; }
  static bool due(std::int64_t done, std::int64_t every) { return every > 0 && done % every == 0; }

  static EngineOptions engine_options(const RunConfig& config) {
    return {config.model, config.plan, config.optimizer, config.schedule, config.steps, config.seed};
  }

  static CheckpointerOptions checkpointer_options(const TrainOptions& options) {
    return {options.output, options.config.checkpoint_async, options.config.checkpoint_keep, options.store,
            options.checkpoint_files};
  }

  // First step to run.
  std::int64_t start() {
    if (!resumed_) {
      engine_.store().initialise(options_.config.model, options_.config.initialization, options_.config.seed);
      return 0;
    }
    load_checkpoint(*options_.resume, *resumed_, engine_);
    return resumed_->next_step;
  }

  void one_step(std::int64_t step) {
    const Clock::time_point begin = Clock::now();
    std::shared_ptr<const Batch> batch;
    {
      const SpanScope span(&timeline_, "batch", Activity::data, static_cast<int>(step));
      batch = batches_.take(step);
    }
    const StepResult result = engine_.train_step(*batch, step);
    // The last operation of a step is the reduction of its loss: every rank is here when the slowest is.
    const double seconds = seconds_since(begin);
    if (!leads()) return;
    report_.steps.push_back(result);
    report_.step_seconds.push_back(seconds);
    report_.wall_seconds += seconds;
    if (options_.on_step) options_.on_step(step, result, seconds);
  }

  void evaluate(std::int64_t done) {
    double sum = 0;
    std::int64_t tokens = 0;
    for (std::int64_t i = 0; i < options_.config.evaluate_batches; ++i) {
      const std::optional<Batch> batch = options_.data->validation_batch(i, options_.config.plan.batch.rows);
      if (!batch || batch->rows == 0) break;
      const std::int64_t valid = batch->valid_tokens();
      sum += engine_.evaluate(*batch) * static_cast<double>(valid);
      tokens += valid;
    }
    if (tokens == 0 || !leads()) return;
    report_.validation_losses.emplace_back(done, sum / static_cast<double>(tokens));
    if (options_.on_evaluation) options_.on_evaluation(done, report_.validation_losses.back().second);
  }

  // All ranks stop after the same step, whichever of them saw the signal first.
  bool should_stop() {
    if (options_.stop == nullptr) return false;
    return all_reduce_sum(comm_, options_.stop->load() ? 1.0 : 0.0) > 0.0;
  }

  void save(std::int64_t done) {
    if (options_.output.empty()) return;
    const SpanScope span(&timeline_, "checkpoint", Activity::checkpoint, static_cast<int>(done - 1));
    CheckpointInfo info;
    info.config = options_.config;
    info.next_step = done;
    info.data = options_.data_name;
    info.data_identity = options_.data->identity();
    checkpointer_.save(info);
  }

  void report_checkpoints() {
    if (!leads()) return;
    const std::vector<std::string>& problems = checkpointer_.problems();
    for (std::size_t i = report_.checkpoint_problems.size(); i < problems.size(); ++i) {
      report_.checkpoint_problems.push_back(problems[i]);
      if (options_.on_checkpoint_problem) options_.on_checkpoint_problem(problems[i]);
    }
    report_.last_checkpoint_failed = !checkpointer_.last_is_safe();
    report_.checkpoint_times = checkpointer_.times();
    report_.checkpoint = checkpointer_.newest();
    keep_timings();
  }

  void keep_timings() {
    const std::vector<CheckpointTimes>& times = report_.checkpoint_times;
    for (; timed_ < times.size() && times[timed_].ended; ++timed_) {
      if (!times[timed_].published || report_.step_seconds.empty()) continue;
      std::vector<double> steps = report_.step_seconds;
      std::nth_element(steps.begin(), steps.begin() + std::ssize(steps) / 2, steps.end());
      try {
        append_timings(options_.output, {times[timed_], steps[steps.size() / 2]});
      } catch (const IoError& error) {
        if (options_.on_checkpoint_problem) options_.on_checkpoint_problem(error.what());
      }
    }
  }

  const TrainOptions& options_;
  const std::optional<CheckpointInfo>& resumed_;
  Prefetcher& batches_;
  Timeline timeline_;
  Communicator& comm_;  // records in timeline_
  TrainReport& report_;
  Arena arena_;
  std::unique_ptr<Kernels> kernels_;
  Engine engine_;
  Checkpointer checkpointer_;
  std::size_t timed_ = 0;  // checkpoints whose times are written, or never will be
};

}  // namespace

namespace {

// What every rank has for itself.
struct RankRecord {
  std::vector<Span> spans;
  std::vector<MemoryLedger> ledgers;  // of device and host
};

template <class Archive>
void serialize(Archive& archive, RankRecord& record) {
  archive(record.spans, record.ledgers);
}

void share_records(const WorldSettings& world, TrainReport& report) {
  const JobShape job = job_shape(world);
  if (job.processes == 1) return;
  RankRecord own;
  const auto rank = static_cast<std::size_t>(job.rank);
  if (rank < report.ledgers.size()) own = {report.spans_by_rank[rank], {report.ledgers[rank], report.host_ledgers[rank]}};
  const std::vector<std::string> records = all_gather_bytes(world, to_bytes(own));
  for (std::size_t i = 0; i < report.ledgers.size(); ++i) {
    auto record = from_bytes<RankRecord>(records[i]);
    report.spans_by_rank[i] = std::move(record.spans);
    report.ledgers[i] = record.ledgers.at(0);
    report.host_ledgers[i] = record.ledgers.at(1);
  }
}

}  // namespace

namespace {

std::optional<CheckpointInfo> read_resumed(const TrainOptions& options) {
  if (!options.resume) return std::nullopt;
  CheckpointInfo info = read_checkpoint_info(*options.resume);
  const std::string identity = options.data->identity();
  if (!options.data_may_change && !info.data_identity.empty() && info.data_identity != identity) {
    throw InputError(fmt::format(
        "{}: was saved with other data ('{}', now '{}'), so that the position in it means nothing; give the data that "
        "the run began with, or --data to go on with other data",
        options.resume->string(), info.data_identity, identity));
  }
  return info;
}

}  // namespace

TrainReport train(const TrainOptions& options) {
  validate(options.config.model);
  require_legal(options.config.plan, options.config.model);
  const std::optional<CheckpointInfo> resumed = read_resumed(options);
  TrainReport report;
  report.first_step = resumed ? resumed->next_step : 0;
  const int ranks = options.config.plan.parallel.world_size();
  report.spans_by_rank.resize(static_cast<std::size_t>(ranks));
  report.ledgers.resize(static_cast<std::size_t>(ranks));
  report.host_ledgers.resize(static_cast<std::size_t>(ranks));
  PrefetchOptions prefetch;
  prefetch.rows = options.config.plan.batch.rows;
  prefetch.first_step = report.first_step;
  prefetch.last_step = std::max(report.first_step, options.config.steps);
  prefetch.batches = options.config.prefetch_batches;
  prefetch.threads = options.config.loader_threads;
  prefetch.consumers = job_shape(options.world).processes == 1 ? ranks : 1;
  prefetch.pitfalls = options.pitfalls;
  Prefetcher batches(*options.data, prefetch);
  run_world({.ranks = ranks, .settings = options.world},
            [&](Communicator& comm) { RankTrainer(options, resumed, batches, comm, report).run(); });
  report.loading = batches.statistics();
  share_records(options.world, report);
  return report;
}

}  // namespace tandem

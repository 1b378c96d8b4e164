// SPDX-License-Identifier: Apache-2.0
#include "optimized/training/trainer.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "core/io/binary.h"
#include "optimized/checkpoint/checkpoint.h"
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
  RankTrainer(const TrainOptions& options, Communicator& comm, TrainReport& report)
      : options_(options),
        comm_(watched(comm)),
        report_(report),
        arena_({.poison = options.poison}),
        kernels_(make_kernels(options.config.plan, options.pitfalls)),
        engine_(context(), engine_options(options.config)) {
    timeline_.set_enabled(options.record_timeline);
  }

  void run() {
    const std::int64_t first = start();
    for (std::int64_t step = first; step < options_.config.steps; ++step) {
      one_step(step);
      const std::int64_t done = step + 1;
      const bool last = done == options_.config.steps;
      if (last || due(done, options_.config.evaluate_every_steps)) evaluate(done);
      const bool stop = should_stop();
      if (last || stop || due(done, options_.config.checkpoint_every_steps)) save(done);
      if (stop && !last) {
        if (leads()) report_.interrupted = true;
        break;
      }
    }
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

  // First step to run.
  std::int64_t start() {
    if (!options_.resume) {
      engine_.store().initialise(options_.config.model, options_.config.initialization, options_.config.seed);
      return 0;
    }
    const CheckpointInfo info = read_checkpoint_info(*options_.resume);
    load_checkpoint(*options_.resume, info, engine_);
    if (leads()) report_.first_step = info.next_step;
    return info.next_step;
  }

  void one_step(std::int64_t step) {
    const std::int64_t rows = options_.config.plan.batch.rows;
    const Clock::time_point begin = Clock::now();
    Batch batch;
    {
      const SpanScope span(&timeline_, "batch", Activity::data, static_cast<int>(step));
      batch = options_.data->training_batch(step, rows);
    }
    const StepResult result = engine_.train_step(batch, step);
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
    {
      const SpanScope span(&timeline_, "checkpoint", Activity::checkpoint, static_cast<int>(done - 1));
      try {
        const std::filesystem::path written =
            save_checkpoint(options_.output, engine_, {options_.config, done, options_.data_name});
        if (leads()) report_.checkpoint = written;
      } catch (const IoError& error) {
        report_.checkpoint_error = error.what();
      }
    }
    comm_.barrier();
  }

  const TrainOptions& options_;
  Timeline timeline_;
  Communicator& comm_;  // records in timeline_
  TrainReport& report_;
  Arena arena_;
  std::unique_ptr<Kernels> kernels_;
  Engine engine_;
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

TrainReport train(const TrainOptions& options) {
  validate(options.config.model);
  require_legal(options.config.plan, options.config.model);
  TrainReport report;
  const int ranks = options.config.plan.parallel.world_size();
  report.spans_by_rank.resize(static_cast<std::size_t>(ranks));
  report.ledgers.resize(static_cast<std::size_t>(ranks));
  report.host_ledgers.resize(static_cast<std::size_t>(ranks));
  run_world({.ranks = ranks, .settings = options.world}, [&](Communicator& comm) { RankTrainer(options, comm, report).run(); });
  share_records(options.world, report);
  return report;
}

}  // namespace tandem

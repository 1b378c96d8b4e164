// SPDX-License-Identifier: Apache-2.0
#include "optimized/training/rank_trainer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/load.h"
#include "optimized/checkpoint/timings.h"
#include "optimized/comm/world.h"
#include "optimized/engine/progress_scope.h"
#include "optimized/machine.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

bool due(std::int64_t done, std::int64_t every) { return every > 0 && done % every == 0; }

PrefetchOptions prefetch_options(const TrainOptions& options, std::int64_t first_step, int consumers) {
  PrefetchOptions prefetch;
  prefetch.rows = options.config.plan.batch.rows;
  prefetch.first_step = first_step;
  prefetch.last_step = std::max(first_step, options.config.steps);
  prefetch.batches = options.config.prefetch_batches;
  prefetch.threads = options.config.loader_threads;
  prefetch.consumers = consumers;
  prefetch.pitfalls = options.pitfalls;
  return prefetch;
}

SkipList skip_list(const TrainOptions& options, std::set<std::int64_t> batches) {
  batches.insert(options.skipped_batches.begin(), options.skipped_batches.end());
  return SkipList(std::move(batches), options.pitfalls);
}

// Of the folder, of a run that goes on: what it has learnt since its checkpoint; and of the checkpoint, wherever it came from.
std::set<std::int64_t> skipped_before(const TrainOptions& options, const std::optional<CheckpointInfo>& resumed) {
  std::set<std::int64_t> skipped;
  if (!resumed) return skipped;
  if (!options.output.empty()) skipped = read_anomaly_ledger(options.output).skipped_batches;
  skipped.insert(resumed->skipped_batches.begin(), resumed->skipped_batches.end());
  return skipped;
}

}  // namespace

RunData::RunData(const TrainOptions& options, const std::optional<CheckpointInfo>& resumed, int consumers)
    : poisoned(options.faults != nullptr ? options.faults->poisoned(*options.data) : nullptr),
      source(poisoned != nullptr ? *poisoned : *options.data, skip_list(options, skipped_before(options, resumed))),
      batches(source, prefetch_options(options, resumed ? resumed->next_step : 0, consumers)) {}

RankTrainer::RankTrainer(const TrainOptions& options, const std::optional<CheckpointInfo>& resumed, RunData& data,
                         Communicator& comm, TrainReport& report)
    : options_(options),
      resumed_(resumed),
      data_(data),
      disturbed_(options.faults != nullptr ? options.faults->disturbed(comm) : nullptr),
      comm_(disturbed_ != nullptr ? *disturbed_ : comm),
      report_(report),
      progress_(options.board != nullptr ? &options.board->slot(comm.rank()) : nullptr),
      kernels_(make_kernels(options.config.plan, {.backend = options.backend,
                                                  .pitfalls = options.pitfalls,
                                                  .device = options.device,
                                                  .fuse_gelu = options.config.plan.recompute.mode != "selective"})),
      arena_({.poison = options.poison, .memory = &kernels_->memory()}),
      engine_(context(), engine_options()),
      checkpointer_(checkpointer_options(), engine_),
      guard_(make_guard(resumed ? resumed->next_step : 0)) {
  timeline_.set_enabled(options.record_timeline);
  timeline_.keep_last(options.kept_spans);
  if (options.backend == "cuda") observer_ = make_nvtx_observer();
  timeline_.set_observer(observer_.get());
  if (options.memory) memory_ = std::make_unique<MemoryTier>(*options.memory, engine_, options.pitfalls);
}

// Before the engine splits it: the groups of each axis record where their world does.
RankContext RankTrainer::context() {
  comm_.set_timeline(&timeline_);
  if (progress_ != nullptr) progress_->is_here = true;
  RankContext context{&comm_, kernels_.get(), &arena_, &timeline_, options_.pitfalls};
  context.progress = progress_;
  return context;
}

EngineOptions RankTrainer::engine_options() {
  const RunConfig& config = options_.config;
  EngineOptions options{config.model, config.plan, config.optimizer, config.schedule, config.steps, config.seed};
  if (options_.faults != nullptr) options_.faults->add_hooks(options, comm_.rank());
  if (config.anomaly.action == AnomalyAction::off) return options;
  options.gate = [this](const UpdateSigns& signs) {
    const ProgressScope waiting(progress_, true);
    return watches() ? guard_->before_update(signs) : UpdateDecision();
  };
  options.on_activation = [this, planted = options.on_activation](std::int64_t step, int layer, TensorView output) {
    if (planted) planted(step, layer, output);
    if (watches()) guard_->see_activation(layer, output);
  };
  return options;
}

CheckpointerOptions RankTrainer::checkpointer_options() const {
  FileOperations* files = options_.checkpoint_files;
  if (options_.faults != nullptr) {
    FileOperations* const failing = options_.faults->files(files != nullptr ? *files : system_files());
    if (failing != nullptr) files = failing;
  }
  return {options_.output, options_.config.checkpoint_async, options_.config.checkpoint_keep, options_.store, files};
}

std::unique_ptr<AnomalyGuard> RankTrainer::make_guard(std::int64_t first_step) {
  if (options_.config.anomaly.action == AnomalyAction::off) return nullptr;
  AnomalyGuardOptions options;
  options.config = options_.config;
  options.folder = options_.output;
  options.starts_anew = !resumed_;
  options.first_step = first_step;
  options.data = options_.data_name;
  options.data_identity = options_.data->identity();
  // As the steps that are left out would have read it.
  options.read_batch = [this](std::int64_t batch) {
    const BatchSource& source = data_.poisoned != nullptr ? *data_.poisoned : *options_.data;
    return source.training_batch(batch, options_.config.plan.batch.rows);
  };
  options.files = options_.checkpoint_files;
  options.pitfalls = options_.pitfalls;
  return std::make_unique<AnomalyGuard>(std::move(options), engine_);
}

void RankTrainer::enter(RunPhase phase) {
  if (progress_ != nullptr) progress_->enter(phase);
}

void RankTrainer::run() {
  std::int64_t step = start();
  Next next = Next::go_on;
  while (step < options_.config.steps && next != Next::end) {
    if (progress_ != nullptr) progress_->step = step;
    next = obey(one_step(step));
    if (next == Next::go_on) next = after(++step);
    report_incidents();
    if (next == Next::back) step = roll_back();
  }
  checkpointer_.finish();
  report_checkpoints();
  finish();
}

// First step to run.
std::int64_t RankTrainer::start() {
  enter(RunPhase::restore);
  if (resumed_) {
    if (options_.faults != nullptr) options_.faults->during(FaultMoment::restore, resumed_->next_step, comm_.rank());
    load_checkpoint(*options_.resume, *resumed_, engine_);
    return resumed_->next_step;
  }
  engine_.store().initialise(options_.config.model, options_.config.initialization, options_.config.seed);
  // Where a run can go back, there is something to go back to from its first step on.
  const AnomalyAction action = options_.config.anomaly.action;
  const bool goes_back = action != AnomalyAction::off && action != AnomalyAction::report;
  if (goes_back && !options_.output.empty() && options_.config.steps > 0) {
    checkpointer_.protect({0});
    checkpointer_.save(info(0));
  }
  return 0;
}

RankTrainer::Next RankTrainer::obey(AnomalyDecision decision) {
  if (decision == AnomalyDecision::roll_back) return Next::back;
  if (decision != AnomalyDecision::give_up) return Next::go_on;
  if (leads()) report_.gave_up = true;
  return Next::end;
}

// What follows a step.
RankTrainer::Next RankTrainer::after(std::int64_t done) {
  if (progress_ != nullptr) progress_->step = done;
  enter(RunPhase::checkpoint);
  checkpointer_.poll();
  const bool last = done == options_.config.steps;
  if (last || due(done, options_.config.evaluate_every_steps)) evaluate(done);
  tell_metrics();
  const bool stop = should_stop();
  Next next = Next::go_on;
  if (last || stop || due(done, options_.config.checkpoint_every_steps)) {
    next = obey(save(done));
  } else {
    keep_in_memory(done);
  }
  report_checkpoints();
  if (!stop || (last && next == Next::go_on)) return next;
  if (leads()) report_.interrupted = true;
  return Next::end;
}

AnomalyDecision RankTrainer::one_step(std::int64_t step) {
  const Clock::time_point begin = Clock::now();
  enter(RunPhase::train);
  if (watches()) guard_->begin_step(step, data_.source.batch_of(step));
  if (options_.faults != nullptr) options_.faults->begin_step(step, comm_.rank(), engine_);
  std::shared_ptr<const Batch> batch;
  {
    enter(RunPhase::data);
    const SpanScope span(&timeline_, "batch", Activity::data, static_cast<int>(step));
    batch = data_.batches.take(step);
  }
  enter(RunPhase::train);
  const StepResult result = compute(*batch, step);
  // The last operation of a step is the reduction of its loss: every rank is here when the slowest is.
  const double seconds = seconds_since(begin);
  const std::size_t seen = std::exchange(spans_seen_, timeline_.count());  // another thread may be recording
  const std::vector<Span> spans = watches() || options_.on_metrics ? timeline_.spans_from(seen) : std::vector<Span>();
  AnomalyDecision decision = AnomalyDecision::go_on;
  if (watches()) {
    const ProgressScope waiting(progress_, true);
    decision = guard_->after_step(result, seconds, spans);
  }
  report_incidents();
  if (decision == AnomalyDecision::go_on) record(step, result, seconds, spans);
  return decision;
}

StepResult RankTrainer::compute(const Batch& batch, std::int64_t step) {
  const StepResult first = engine_.train_step(batch, step);
  if (!first.retry) return first;
  const StepResult second = engine_.train_step(batch, step);
  TANDEM_CHECK(!second.retry, fmt::format("step {} is computed a third time", step));
  return second;
}

void RankTrainer::record(std::int64_t step, const StepResult& result, double seconds, const std::vector<Span>& spans) {
  if (!leads()) return;
  report_.steps.push_back(result);
  report_.step_seconds.push_back(seconds);
  report_.wall_seconds += seconds;
  if (options_.on_step) options_.on_step(step, result, seconds);
  skipped_steps_ += result.skipped ? 1 : 0;
  if (options_.on_metrics) untold_.emplace(metrics_of(step, result, seconds), spans);
}

StepMetrics RankTrainer::metrics_of(std::int64_t step, const StepResult& result, double seconds) const {
  StepMetrics metrics;
  metrics.step = step + 1;
  metrics.total_steps = options_.config.steps;
  metrics.unix_seconds = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  metrics.attempt = options_.attempt;
  metrics.loss = result.loss;
  metrics.gradient_norm = result.gradient_norm;
  metrics.learning_rate = result.learning_rate;
  metrics.loss_scale = result.loss_scale;
  metrics.tokens = result.valid_tokens;
  metrics.step_seconds = seconds;
  metrics.tokens_per_second = static_cast<double>(result.valid_tokens) / seconds;
  for (const std::int64_t bytes : arena_.ledger().current()) metrics.memory_bytes += bytes;
  metrics.peak_memory_bytes = arena_.ledger().peak_total();
  metrics.skipped_steps = skipped_steps_;
  metrics.incidents = std::ssize(report_.incidents);
  if (!report_.incidents.empty()) metrics.last_incident = report_.incidents.back().describe();
  return metrics;
}

// When all that belongs to the step is known.
void RankTrainer::tell_metrics() {
  if (!untold_) return;
  auto& [metrics, spans] = *untold_;
  const auto& evaluations = report_.validation_losses;
  if (!evaluations.empty() && evaluations.back().first == metrics.step) metrics.validation_loss = evaluations.back().second;
  options_.on_metrics(metrics, spans);
  untold_.reset();
}

void RankTrainer::evaluate(std::int64_t done) {
  enter(RunPhase::evaluate);
  double sum = 0;
  std::int64_t tokens = 0;
  for (std::int64_t i = 0; i < options_.config.evaluate_batches; ++i) {
    const std::optional<Batch> batch = options_.data->validation_batch(i, options_.config.plan.batch.rows);
    if (!batch || batch->rows == 0) break;
    const std::int64_t valid = batch->valid_tokens();
    sum += engine_.evaluate(*batch) * static_cast<double>(valid);
    tokens += valid;
    enter(RunPhase::evaluate);
  }
  if (tokens == 0 || !leads()) return;
  report_.validation_losses.emplace_back(done, sum / static_cast<double>(tokens));
  if (options_.on_evaluation) options_.on_evaluation(done, report_.validation_losses.back().second);
}

// All ranks stop after the same step, whichever of them saw the signal first.
bool RankTrainer::should_stop() {
  if (options_.stop == nullptr) return false;
  const ProgressScope waiting(progress_, true);
  return all_reduce_sum(comm_, options_.stop->load() ? 1.0 : 0.0) > 0.0;
}

void RankTrainer::finish() {
  enter(RunPhase::finished);
  const auto rank = static_cast<std::size_t>(comm_.rank());
  report_.spans_by_rank[rank] = timeline_.spans();
  report_.ledgers[rank] = arena_.ledger();
  report_.host_ledgers[rank] = engine_.host_ledger();
  if (!leads()) return;
  report_.kernels = kernels_->info();
  report_.skipped_batches = data_.source.list().batches();
  if (!watches()) return;
  report_.guard_seconds = guard_->seconds();
  report_.guard_bytes = guard_->bytes_looked_at();
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// The optimized side of a pair, on threads of this process.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "core/io/hash.h"
#include "harness/measurement.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "optimized/context_parallel/zigzag.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/machine.h"
#include "suites/benefits.h"
#include "suites/evidence_bytes.h"
#include "suites/evidence_collector.h"
#include "suites/evidence_stage.h"
#include "suites/machine_of.h"
#include "suites/one_step.h"
#include "suites/pair.h"

namespace tandem {
namespace {

// Of a communication: a small model is never so slow, and a rank that waits in vain should not wait long.
constexpr std::chrono::milliseconds kDeadline{20000};

// Models with fewer are too small for a comparison of bytes.
constexpr std::int64_t kFewParameters = 4000;

std::uint64_t input_hash(const Batch& batch) {
  if (batch.rows == 0) return 0;
  const std::uint64_t ids = hash64(std::as_bytes(std::span(batch.ids)));
  return hash64(std::as_bytes(std::span(batch.targets)), ids);
}

// One rank's part of engine_run().
class RankRun {
 public:
  RankRun(const PairInputs& inputs, const RunContext& context, Communicator& comm, EvidenceCollector& collector,
          EngineRun& result)
      : inputs_(inputs),
        comm_(comm),
        collector_(collector),
        result_(result),
        pitfalls_(context.pitfalls),
        kernels_(make_kernels(inputs.plan, machine_of(context))) {
    if (context.backend == "cuda") observer_ = make_nvtx_observer();
    timeline_.set_observer(observer_.get());
    comm_.set_timeline(&timeline_);
  }

  void run() {
    timeline_.set_enabled(false);
    sgd_step();
    timeline_.set_enabled(inputs_.watched);
    if (inputs_.steps > 0) own_steps();
    result_.measured.spans_by_rank[static_cast<std::size_t>(comm_.rank())] = timeline_.spans();
  }

 private:
  [[nodiscard]] bool leads() const { return comm_.rank() == 0; }
  [[nodiscard]] RankContext context(Arena& arena) { return {&comm_, kernels_.get(), &arena, &timeline_, pitfalls_, {}}; }

  void sgd_step() {
    Arena arena({.poison = true, .memory = &kernels_->memory()});
    Engine engine(context(arena), {inputs_.model, inputs_.plan, plain_sgd(inputs_), {}, 1, inputs_.seed, {}});
    engine.store().initialise(inputs_.model, inputs_.initialization, inputs_.seed);
    collector_.collect(std::string(kInitialParameters), 0, engine, &ParameterStore::master);
    engine.set_gradient_observer(
        [&](const Engine& e) { collector_.collect(std::string(kGradients), 0, e, &ParameterStore::gradient); });
    const StepResult done = engine.train_step(inputs_.data->training_batch(0, inputs_.plan.batch.rows), 0);
    if (inputs_.steps == 0 && leads()) keep_totals(done);
    if (leads())
      result_.evidence.stages.push_back(make_stage(inputs_, "gradient_norm", 0, {{"gradient_norm", {done.gradient_norm}}}));
    result_.rows[static_cast<std::size_t>(comm_.rank())] = engine.rows();
    collector_.collect("sgd_parameters", 0, engine, &ParameterStore::master);
  }

  void own_steps() {
    Arena arena({.poison = true, .memory = &kernels_->memory()});
    Engine engine(context(arena), {inputs_.model, inputs_.plan, own_optimizer(inputs_), inputs_.schedule, inputs_.steps,
                                   inputs_.seed, inputs_.injected_seconds});
    engine.store().initialise(inputs_.model, inputs_.initialization, inputs_.seed);
    std::vector<double> norms;
    comm_.barrier();
    std::int64_t first_begin = 0;
    std::int64_t end = Timeline::now_ns();
    for (std::int64_t step = 0; step < inputs_.steps; ++step) {
      const std::int64_t begin = end;  // a step lasts from the end of the one before to its own: nothing falls between two
      const Batch batch = take_batch(step);
      const StepResult done = engine.train_step(batch, step);
      end = Timeline::now_ns();
      norms.push_back(done.gradient_norm);
      if (!leads()) continue;
      keep_totals(done);
      if (step < result_.measured.warm_up_steps) continue;
      if (step == result_.measured.warm_up_steps) first_begin = begin;
      result_.measured.step_seconds.push_back(static_cast<double>(end - begin) * 1e-9);
      result_.measured.wall_seconds = static_cast<double>(end - first_begin) * 1e-9;
      tokens_ += done.valid_tokens;
    }
    collector_.collect("adamw_parameters", static_cast<int>(inputs_.steps) - 1, engine, &ParameterStore::master);
    if (leads()) result_.evidence.stages.push_back(series(kLosses, "loss", result_.evidence.losses));
    if (leads()) result_.evidence.stages.push_back(series(kGradientNorms, "gradient_norm", norms));
    const auto measured_steps = static_cast<std::int64_t>(result_.measured.step_seconds.size());
    if (leads()) result_.measured.tokens_per_step = measured_steps > 0 ? tokens_ / measured_steps : 0;
    const auto rank = static_cast<std::size_t>(comm_.rank());
    result_.peak_bytes[rank] = arena.ledger().peak();
    result_.rest_bytes[rank] = arena.ledger().current();
    result_.host_bytes[rank] = engine.host_ledger().current();
  }

  // A step holds the taking of its batch, so the timeline's window does too.
  [[nodiscard]] Batch take_batch(std::int64_t step) {
    const SpanScope window(&timeline_, "take batch", Activity::step, static_cast<int>(step));
    const SpanScope span(&timeline_, "batch", Activity::data, static_cast<int>(step));
    return inputs_.data->training_batch(step, inputs_.plan.batch.rows);
  }

  void keep_totals(const StepResult& done) {
    result_.evidence.losses.push_back(done.loss);
    result_.auxiliary_losses.push_back(done.auxiliary_loss);
    result_.kept_assignments.push_back(done.kept_assignments);
    result_.dropped_assignments.push_back(done.dropped_assignments);
  }

  [[nodiscard]] StageEvidence series(std::string_view stage, const std::string& name, const std::vector<double>& values) const {
    return make_stage(inputs_, stage, static_cast<int>(inputs_.steps) - 1, {{name, values}});
  }

  const PairInputs& inputs_;
  Communicator& comm_;
  EvidenceCollector& collector_;
  EngineRun& result_;
  PitfallSet pitfalls_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<SpanObserver> observer_;  // before the timeline, which borrows it
  Timeline timeline_;
  std::int64_t tokens_ = 0;
};

// Of every part of the batch that some rank has for itself: rows of a data rank, tokens of a context rank.
std::vector<std::uint64_t> input_hashes(const PairInputs& inputs) {
  std::vector<std::uint64_t> hashes;
  const ParallelDegrees& degrees = inputs.plan.parallel;
  for (int data = 0; data < degrees.data; ++data) {
    const Interval rows = balanced_part(inputs.plan.batch.rows, degrees.data, data);
    const Batch batch = inputs.data->training_rows(0, inputs.plan.batch.rows, rows);
    for (int context = 0; context < degrees.context; ++context) {
      hashes.push_back(input_hash(context_slice(batch, degrees.context, context)));
    }
  }
  return hashes;
}

void add_predictions(const PairInputs& inputs, const RunContext& context, Measured& measured) {
  const std::int64_t sequence = inputs.data->sequence();
  measured.model_flops_per_step =
      static_cast<double>(inputs.plan.batch.rows) * model_flops_per_row(inputs.model, sequence, context.pitfalls);
  const int threads = inputs.plan.parallel.world_size() * inputs.plan.threads_per_rank;
  if (!context.peak_flops_by_threads.empty()) {
    const auto used = std::min(static_cast<std::size_t>(threads), context.peak_flops_by_threads.size());
    measured.peak_flops_per_second = context.peak_flops_by_threads[used - 1];
  }
  if (context.gpu_peaks) measured.peak_flops_per_second = context.gpu_peaks->of(inputs.plan);
  measured.predicted_peak_bytes = forecast_memory(inputs.model, inputs.plan, inputs.optimizer.kind, sequence).device;
  // Workspace is the program's alone; of a few kilobytes, rounding up to 64 a tensor is what is measured.
  measured.predicted_peak_bytes[static_cast<std::size_t>(MemoryCategory::workspace)] = 0;
  if (num_parameters(inputs.model) < kFewParameters) measured.predicted_peak_bytes = {};
  const ProgramFacts facts = facts_of(inputs);
  measured.predicted_bytes_on_wire = facts.wire_bytes[static_cast<std::size_t>(Purpose::gradient)] +
                                     facts.wire_bytes[static_cast<std::size_t>(Purpose::parameter)] +
                                     facts.wire_bytes[static_cast<std::size_t>(Purpose::activation)];
}

// What one process has of a run: everything of its own rank, and of rank 0 what is of the whole run.
struct ProcessPart {
  EvidenceCollector::Stages stages;
  EngineRun run;
};

template <class Archive>
void serialize(Archive& archive, ProcessPart& part) {
  EngineRun& run = part.run;
  archive(part.stages, run.evidence.stages, run.evidence.losses, run.auxiliary_losses, run.kept_assignments,
          run.dropped_assignments, run.peak_bytes, run.rest_bytes, run.host_bytes, run.rows);
  Measured& measured = run.measured;
  archive(measured.spans_by_rank, measured.step_seconds, measured.wall_seconds, measured.tokens_per_step);
}

// Puts together what the ranks have, where each is a process: afterwards all processes have the same of the whole run.
void share(const RunContext& context, EngineRun& result, EvidenceCollector& collector) {
  if (context.world.transport == "threads") return;
  const std::vector<std::string> parts = all_gather_bytes(context.world, to_bytes(ProcessPart{collector.stages(), result}));
  collector.clear();
  for (std::size_t rank = 0; rank < result.rows.size(); ++rank) {
    auto part = from_bytes<ProcessPart>(parts[rank]);
    collector.merge(part.stages);
    EngineRun& theirs = part.run;
    if (rank == 0) {
      result.evidence.stages = std::move(theirs.evidence.stages);
      result.evidence.losses = std::move(theirs.evidence.losses);
      result.auxiliary_losses = std::move(theirs.auxiliary_losses);
      result.kept_assignments = std::move(theirs.kept_assignments);
      result.dropped_assignments = std::move(theirs.dropped_assignments);
      result.measured.step_seconds = std::move(theirs.measured.step_seconds);
      result.measured.wall_seconds = theirs.measured.wall_seconds;
      result.measured.tokens_per_step = theirs.measured.tokens_per_step;
    }
    result.measured.spans_by_rank[rank] = std::move(theirs.measured.spans_by_rank[rank]);
    result.peak_bytes[rank] = theirs.peak_bytes[rank];
    result.rest_bytes[rank] = theirs.rest_bytes[rank];
    result.host_bytes[rank] = theirs.host_bytes[rank];
    result.rows[rank] = std::move(theirs.rows[rank]);
  }
}

}  // namespace

EngineRun engine_run(const PairInputs& inputs, const RunContext& context, const std::string& side_suffix) {
  EngineRun result;
  const int ranks = inputs.plan.parallel.world_size();
  result.evidence.side = fmt::format("engine {} {}{}", inputs.plan.precision, describe_layout(inputs.plan), side_suffix);
  result.evidence.unit_roundoff = candidate_roundoff(inputs.plan);
  result.evidence.ranks = ranks;
  result.evidence.input_hashes = input_hashes(inputs);
  result.measured.spans_by_rank.resize(static_cast<std::size_t>(ranks));
  result.measured.warm_up_steps = 1;
  result.peak_bytes.resize(static_cast<std::size_t>(ranks));
  result.rest_bytes.resize(static_cast<std::size_t>(ranks));
  result.host_bytes.resize(static_cast<std::size_t>(ranks));
  result.rows.resize(static_cast<std::size_t>(ranks));
  EvidenceCollector collector(inputs, result.evidence);
  run_world({.ranks = ranks, .deadline = kDeadline, .settings = context.world},
            [&](Communicator& comm) { RankRun(inputs, context, comm, collector, result).run(); });
  share(context, result, collector);
  // In order of execution: the norm of step 0 follows its gradients, the series end the record.
  const std::vector<StageEvidence> series = std::exchange(result.evidence.stages, {});
  collector.finish({kInitialParameters, kGradients});
  result.evidence.stages.push_back(series.front());
  collector.finish({"sgd_parameters"});
  if (inputs.steps > 0) collector.finish({"adamw_parameters"});
  result.evidence.stages.insert(result.evidence.stages.end(), series.begin() + 1, series.end());
  for (const BytesByCategory& peak : result.peak_bytes) {
    for (std::size_t i = 0; i < kMemoryCategories; ++i) {
      result.measured.peak_bytes[i] = std::max(result.measured.peak_bytes[i], peak[i]);
    }
  }
  add_predictions(inputs, context, result.measured);
  return result;
}

namespace {

// Gradients of the loss from those of the scaled loss, on their way to `sink`.
TraceSink unscaled(TraceSink sink, double scale) {
  if (scale == 1.0) return sink;
  return [sink = std::move(sink), scale](const TracedTensor& traced) {
    if (!traced.name.starts_with("d.")) {
      sink(traced);
      return;
    }
    std::vector<double> values = ParameterStore::values_of(traced.values);
    for (double& value : values) value /= scale;
    TracedTensor copy = traced;
    copy.shard.dtype = DType::f64;
    copy.values = view_of(values, traced.values.shape());
    sink(copy);
  };
}

// Of a part of a gradient, without padding, which belongs to no global element and is at the end.
TraceEntry gradient_entry(const OwnedPart& part, std::int64_t hidden, int rank) {
  TraceEntry entry;
  entry.name = "d." + part.shard.global_name;
  entry.kind = TraceKind::parameter_gradient;
  entry.shard = part.shard;
  entry.rank = rank;
  const std::int64_t end = num_elements(entry.shard.local_shape()) - entry.shard.padded_rows * hidden;
  const Interval real = {part.elements.begin, std::max(part.elements.begin, std::min(part.elements.end, end))};
  entry.shard.padded_rows = 0;
  if (entry.shard.flat_range) entry.shard.flat_range = real;
  return entry;
}

}  // namespace

void trace_one_step(const PairInputs& inputs, const RunContext& context, TraceRecorder& trace) {
  // On threads whatever the transport: a recorder is no thing to be put together from processes, and what one looks for is the
  // tensor that goes wrong.
  WorldSettings settings = context.world;
  settings.transport = "threads";
  run_world({.ranks = inputs.plan.parallel.world_size(), .deadline = kDeadline, .settings = settings}, [&](Communicator& comm) {
    const auto kernels = make_kernels(inputs.plan, machine_of(context));
    Arena arena({.poison = true, .memory = &kernels->memory()});
    const double scale = scales_loss(inputs.plan) ? inputs.plan.loss_scale.initial : 1.0;
    Engine engine({&comm, kernels.get(), &arena, nullptr, context.pitfalls, unscaled(trace.sink(comm.rank()), scale)},
                  {inputs.model, inputs.plan, plain_sgd(inputs), {}, 1, inputs.seed, {}});
    engine.store().initialise(inputs.model, inputs.initialization, inputs.seed);
    engine.set_gradient_observer([&](const Engine& e) {
      for (const OwnedPart& part : e.store().parts()) {
        const TraceEntry entry = gradient_entry(part, inputs.model.hidden, comm.rank());
        std::vector<double> values = ParameterStore::values_of(e.store().memory(), e.store().gradient(part));
        values.resize(static_cast<std::size_t>(entry.shard.num_elements()));
        for (double& value : values) value /= scale;
        if (!values.empty()) trace.append(entry, view_of(values, {std::ssize(values)}));
      }
    });
    engine.train_step(inputs.data->training_batch(0, inputs.plan.batch.rows), 0);
  });
}

}  // namespace tandem

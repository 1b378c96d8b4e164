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
#include "optimized/context_parallel/zigzag.h"
#include "optimized/hybrid_parallel/whole_tensors.h"
#include "optimized/machine.h"
#include "suites/benefits.h"
#include "suites/evidence_stage.h"
#include "suites/one_step.h"
#include "suites/pair.h"

namespace tandem {
namespace {

// Of a communication: a small model is never so slow, and a rank that waits in vain should not wait long.
constexpr std::chrono::milliseconds kDeadline{20000};

// Models with fewer are too small for a comparison of bytes.
constexpr std::int64_t kFewParameters = 4000;

std::uint64_t hash_of(TensorView view) {
  return hash64({static_cast<const std::byte*>(view.data()), static_cast<std::size_t>(view.size_bytes())});
}

std::uint64_t input_hash(const Batch& batch) {
  if (batch.rows == 0) return 0;
  const std::uint64_t ids = hash64(std::as_bytes(std::span(batch.ids)));
  return hash64(std::as_bytes(std::span(batch.targets)), ids);
}

// Where all ranks put what they hold.
class Collector {
 public:
  Collector(const PairInputs& inputs, Evidence& evidence) : inputs_(inputs), evidence_(evidence) {}

  void collect(const std::string& stage, int step, const Engine& engine, PartView view) {
    const std::scoped_lock lock(mutex_);
    Stage& mine = stages_[stage];
    mine.step = step;
    const ParameterStore& store = engine.store();
    for (const OwnedPart& part : store.parts()) {
      const ShardSpec& shard = part.shard;
      const TensorView local = (store.*view)(part);
      mine.hashes.push_back({shard.global_name, shard.describe_slices(), stage, engine.groups().rank(), hash_of(local)});
      if (shard.replica_index != 0) continue;
      std::vector<double>& whole = mine.tensors[shard.global_name];
      // What no rank holds stays NaN, which no bound lets pass.
      if (whole.empty()) whole.assign(static_cast<std::size_t>(num_elements(shard.global_shape)), std::nan(""));
      std::vector<double> values = ParameterStore::values_of(local);
      // Of the loss, not of the scaled loss.
      if (view == PartView(&ParameterStore::gradient)) unscale(values, engine);
      scatter_into(shard, values, whole);
    }
    if (view == &ParameterStore::master) add_stored(mine, stage, engine);
  }

  void finish(std::initializer_list<std::string_view> order) {
    for (const std::string_view name : order) {
      Stage& stage = stages_[std::string(name)];
      std::vector<StageTensor> tensors;
      for (const ParameterSpec& spec : gpt_parameters(inputs_.model)) {
        tensors.push_back({spec.name, std::move(stage.tensors[spec.name])});
      }
      evidence_.stages.push_back(make_stage(inputs_, name, stage.step, std::move(tensors)));
      // In the order of the model, whichever rank came first.
      std::stable_sort(stage.hashes.begin(), stage.hashes.end(),
                       [&](const ReplicaHash& a, const ReplicaHash& b) { return place(a.tensor) < place(b.tensor); });
      evidence_.replicas.insert(evidence_.replicas.end(), stage.hashes.begin(), stage.hashes.end());
    }
  }

 private:
  static void unscale(std::vector<double>& values, const Engine& engine) {
    for (double& value : values) value /= engine.loss_scaler().scale();
  }

  struct Stage;
  // What this rank computes with, where that is another copy than what it updates: all ranks must have the same.
  static void add_stored(Stage& mine, const std::string& stage, const Engine& engine) {
    const ParameterStore& store = engine.store();
    const int zero = engine.options().plan.zero_stage;
    if (zero == 3 || (zero == 0 && !store.has_master_copy())) return;
    for (std::size_t i = 0; i < store.size(); ++i) {
      const ShardSpec& shard = store.shard(i);
      mine.hashes.push_back({shard.global_name, shard.describe_slices() + " as stored", stage, engine.groups().rank(),
                             hash_of(store.parameter(i))});
    }
  }

  struct Stage {
    int step = 0;
    std::map<std::string, std::vector<double>> tensors;
    std::vector<ReplicaHash> hashes;
  };
  std::size_t place(const std::string& name) {
    if (places_.empty()) {
      for (const ParameterSpec& spec : gpt_parameters(inputs_.model)) places_.emplace(spec.name, places_.size());
    }
    return places_.at(name);
  }

  const PairInputs& inputs_;
  Evidence& evidence_;
  std::mutex mutex_;
  std::map<std::string, Stage> stages_;
  std::map<std::string, std::size_t> places_;
};

// One rank's part of engine_run().
class RankRun {
 public:
  RankRun(const PairInputs& inputs, const RunContext& context, Communicator& comm, Collector& collector, EngineRun& result)
      : inputs_(inputs),
        comm_(comm),
        collector_(collector),
        result_(result),
        pitfalls_(context.pitfalls),
        kernels_(make_kernels(inputs.plan, context.pitfalls)) {
    comm_.set_timeline(&timeline_);
  }

  void run() {
    timeline_.set_enabled(false);
    sgd_step();
    timeline_.set_enabled(true);
    if (inputs_.steps > 0) own_steps();
    result_.measured.spans_by_rank[static_cast<std::size_t>(comm_.rank())] = timeline_.spans();
  }

 private:
  [[nodiscard]] bool leads() const { return comm_.rank() == 0; }
  [[nodiscard]] RankContext context(Arena& arena) { return {&comm_, kernels_.get(), &arena, &timeline_, pitfalls_, {}}; }

  void sgd_step() {
    Arena arena({.poison = true});
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
    Arena arena({.poison = true});
    Engine engine(context(arena), {inputs_.model, inputs_.plan, own_optimizer(inputs_), inputs_.schedule, inputs_.steps,
                                   inputs_.seed, inputs_.injected_seconds});
    engine.store().initialise(inputs_.model, inputs_.initialization, inputs_.seed);
    std::vector<double> norms;
    comm_.barrier();
    std::int64_t first_begin = 0;
    std::int64_t end = Timeline::now_ns();
    for (std::int64_t step = 0; step < inputs_.steps; ++step) {
      const std::int64_t begin = end;  // a step lasts from the end of the one before to its own: nothing falls between two
      const Batch batch = inputs_.data->training_batch(step, inputs_.plan.batch.rows);
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
  Collector& collector_;
  EngineRun& result_;
  PitfallSet pitfalls_;
  std::unique_ptr<Kernels> kernels_;
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
  measured.predicted_peak_bytes = forecast_memory(inputs.model, inputs.plan, inputs.optimizer.kind, sequence).device;
  // Workspace is the program's alone; of a few kilobytes, rounding up to 64 a tensor is what is measured.
  measured.predicted_peak_bytes[static_cast<std::size_t>(MemoryCategory::workspace)] = 0;
  if (num_parameters(inputs.model) < kFewParameters) measured.predicted_peak_bytes = {};
  const ProgramFacts facts = facts_of(inputs);
  measured.predicted_bytes_on_wire = facts.wire_bytes[static_cast<std::size_t>(Purpose::gradient)] +
                                     facts.wire_bytes[static_cast<std::size_t>(Purpose::parameter)] +
                                     facts.wire_bytes[static_cast<std::size_t>(Purpose::activation)];
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
  Collector collector(inputs, result.evidence);
  run_threads_world({.ranks = ranks, .deadline = kDeadline},
                    [&](Communicator& comm) { RankRun(inputs, context, comm, collector, result).run(); });
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
  run_threads_world({.ranks = inputs.plan.parallel.world_size(), .deadline = kDeadline}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_kernels(inputs.plan, context.pitfalls);
    const double scale = scales_loss(inputs.plan) ? inputs.plan.loss_scale.initial : 1.0;
    Engine engine({&comm, kernels.get(), &arena, nullptr, context.pitfalls, unscaled(trace.sink(comm.rank()), scale)},
                  {inputs.model, inputs.plan, plain_sgd(inputs), {}, 1, inputs.seed, {}});
    engine.store().initialise(inputs.model, inputs.initialization, inputs.seed);
    engine.set_gradient_observer([&](const Engine& e) {
      for (const OwnedPart& part : e.store().parts()) {
        const TraceEntry entry = gradient_entry(part, inputs.model.hidden, comm.rank());
        std::vector<double> values = ParameterStore::values_of(e.store().gradient(part));
        values.resize(static_cast<std::size_t>(entry.shard.num_elements()));
        for (double& value : values) value /= scale;
        if (!values.empty()) trace.append(entry, view_of(values, {std::ssize(values)}));
      }
    });
    engine.train_step(inputs.data->training_batch(0, inputs.plan.batch.rows), 0);
  });
}

}  // namespace tandem

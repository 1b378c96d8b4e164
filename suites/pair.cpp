// SPDX-License-Identifier: Apache-2.0
#include "suites/pair.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "core/io/hash.h"
#include "harness/measurement.h"
#include "optimized/engine/layout.h"
#include "reference/training.h"
#include "suites/evidence_stage.h"

namespace tandem {
namespace {

OptimizerConfig plain_sgd(const PairInputs& inputs) {
  OptimizerConfig sgd;
  sgd.kind = OptimizerKind::sgd;
  sgd.learning_rate = inputs.optimizer_frozen ? 0.0 : inputs.sgd_learning_rate;
  sgd.weight_decay = 0.0;
  sgd.max_grad_norm = 0.0;
  return sgd;
}

OptimizerConfig own_optimizer(const PairInputs& inputs) {
  OptimizerConfig config = inputs.optimizer;
  if (inputs.optimizer_frozen) config.learning_rate = 0.0;
  return config;
}

std::uint64_t hash_of(TensorView view, std::uint64_t seed) {
  return hash64({static_cast<const std::byte*>(view.data()), static_cast<std::size_t>(view.size_bytes())}, seed);
}

std::uint64_t input_hash(const Batch& batch) {
  if (batch.rows == 0) return 0;
  const std::uint64_t ids = hash64(std::as_bytes(std::span(batch.ids)));
  return hash64(std::as_bytes(std::span(batch.targets)), ids);
}

std::vector<StageTensor> tensors_of(const ParameterStore& store, TensorView (ParameterStore::*view)(std::size_t) const) {
  std::vector<StageTensor> tensors;
  for (std::size_t i = 0; i < store.specs().size(); ++i) {
    tensors.push_back({store.specs()[i].name, ParameterStore::values_of((store.*view)(i))});
  }
  return tensors;
}

// One rank's part of engine_run(): fills the evidence on rank 0 and this rank's element of its vectors on every rank.
class RankRun {
 public:
  RankRun(const PairInputs& inputs, const RunContext& context, Communicator& comm, EngineRun& result)
      : inputs_(inputs),
        comm_(comm),
        result_(result),
        pitfalls_(context.pitfalls),
        kernels_(make_cpu_kernels({.threads = inputs.plan.threads_per_rank, .pitfalls = context.pitfalls})) {
    comm_.set_timeline(&timeline_);
  }

  void run() {
    timeline_.set_enabled(false);
    sgd_step();
    timeline_.set_enabled(true);
    own_steps();
    const auto rank = static_cast<std::size_t>(comm_.rank());
    result_.evidence.replica_hashes[rank] = hash_;
    const Interval rows = balanced_part(inputs_.plan.batch.rows, comm_.size(), comm_.rank());
    result_.evidence.input_hashes[rank] = input_hash(inputs_.data->training_rows(0, inputs_.plan.batch.rows, rows));
    result_.measured.spans_by_rank[rank] = timeline_.spans();
  }

 private:
  [[nodiscard]] bool leads() const { return comm_.rank() == 0; }
  [[nodiscard]] RankContext context(Arena& arena) { return {&comm_, kernels_.get(), &arena, &timeline_, pitfalls_}; }

  void keep(std::string_view stage, std::int64_t step, const ParameterStore& store,
            TensorView (ParameterStore::*view)(std::size_t) const) {
    if (!leads()) return;
    result_.evidence.stages.push_back(make_stage(inputs_, stage, static_cast<int>(step), tensors_of(store, view)));
  }

  void sgd_step() {
    Arena arena({.poison = true});
    Engine engine(context(arena), {inputs_.model, inputs_.plan, plain_sgd(inputs_), {}, 1, inputs_.seed});
    engine.store().initialise(inputs_.model, Initialization::scattered, inputs_.seed);
    keep(kInitialParameters, 0, engine.store(), &ParameterStore::parameter);
    engine.set_gradient_observer([&](const Engine& e) {
      hash_ = hash_of(e.store().all_gradients(), hash_);
      keep(kGradients, 0, e.store(), &ParameterStore::gradient);
    });
    engine.train_step(inputs_.data->training_batch(0, inputs_.plan.batch.rows), 0);
    hash_ = hash_of(engine.store().all_parameters(), hash_);
    keep("sgd_parameters", 0, engine.store(), &ParameterStore::parameter);
  }

  void own_steps() {
    Arena arena({.poison = true});
    Engine engine(context(arena),
                  {inputs_.model, inputs_.plan, own_optimizer(inputs_), inputs_.schedule, inputs_.steps, inputs_.seed});
    engine.store().initialise(inputs_.model, Initialization::scattered, inputs_.seed);
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
      result_.evidence.losses.push_back(done.loss);
      if (step < result_.measured.warm_up_steps) continue;
      if (step == result_.measured.warm_up_steps) first_begin = begin;
      result_.measured.step_seconds.push_back(static_cast<double>(end - begin) * 1e-9);
      result_.measured.wall_seconds = static_cast<double>(end - first_begin) * 1e-9;
      tokens_ += done.valid_tokens;
    }
    hash_ = hash_of(engine.store().all_parameters(), hash_);
    keep("adamw_parameters", inputs_.steps - 1, engine.store(), &ParameterStore::parameter);
    keep_series(norms);
    result_.peak_bytes[static_cast<std::size_t>(comm_.rank())] = arena.ledger().peak();
  }

  void keep_series(const std::vector<double>& norms) {
    if (!leads()) return;
    Evidence& evidence = result_.evidence;
    const auto last = static_cast<int>(inputs_.steps) - 1;
    evidence.stages.push_back(make_stage(inputs_, kLosses, last, {{"loss", evidence.losses}}));
    evidence.stages.push_back(make_stage(inputs_, kGradientNorms, last, {{"gradient_norm", norms}}));
    const auto measured_steps = static_cast<std::int64_t>(result_.measured.step_seconds.size());
    result_.measured.tokens_per_step = measured_steps > 0 ? tokens_ / measured_steps : 0;
  }

  const PairInputs& inputs_;
  Communicator& comm_;
  EngineRun& result_;
  PitfallSet pitfalls_;
  std::unique_ptr<Kernels> kernels_;
  Timeline timeline_;
  std::uint64_t hash_ = 0;
  std::int64_t tokens_ = 0;
};

template <class Real>
std::vector<StageTensor> tensors_of(const GptConfig& model, const reference::NamedTensors<Real>& named) {
  std::vector<StageTensor> tensors;
  for (const ParameterSpec& spec : gpt_parameters(model)) {
    const std::vector<Real>& values = named.at(spec.name);
    tensors.push_back({spec.name, {values.begin(), values.end()}});
  }
  return tensors;
}

}  // namespace

template <class Real>
Evidence reference_evidence(const PairInputs& inputs, int ranks, int micro_batches) {
  reference::TrainingRun run;
  run.model = inputs.model;
  run.layout = {ranks, micro_batches};
  run.seed = inputs.seed;
  run.initialization = Initialization::scattered;
  run.batch = [&](std::int64_t step) { return inputs.data->training_batch(step, inputs.plan.batch.rows); };
  run.optimizer = plain_sgd(inputs);
  run.steps = 1;
  const auto initial = reference::initial_parameters<Real>(inputs.model, Initialization::scattered, inputs.seed);
  const auto sgd = reference::train<Real>(run);
  run.optimizer = own_optimizer(inputs);
  run.schedule = inputs.schedule;
  run.steps = inputs.steps;
  const auto own = reference::train<Real>(run);

  Evidence evidence;
  const int bits = static_cast<int>(sizeof(Real)) * 8;
  evidence.side = fmt::format("reference fp{} ranks {} micro-batches {}", bits, ranks, micro_batches);
  evidence.unit_roundoff = std::numeric_limits<Real>::epsilon() / 2;
  const auto last = static_cast<int>(inputs.steps) - 1;
  evidence.stages = {make_stage(inputs, kInitialParameters, 0, tensors_of(inputs.model, initial)),
                     make_stage(inputs, kGradients, 0, tensors_of(inputs.model, sgd.gradients_step0)),
                     make_stage(inputs, "sgd_parameters", 0, tensors_of(inputs.model, sgd.parameters)),
                     make_stage(inputs, "adamw_parameters", last, tensors_of(inputs.model, own.parameters)),
                     make_stage(inputs, kLosses, last, {{"loss", own.losses}}),
                     make_stage(inputs, kGradientNorms, last, {{"gradient_norm", own.gradient_norms}})};
  evidence.losses = own.losses;
  return evidence;
}

template Evidence reference_evidence<float>(const PairInputs&, int, int);
template Evidence reference_evidence<double>(const PairInputs&, int, int);

EngineRun engine_run(const PairInputs& inputs, const RunContext& context, const std::string& side_suffix) {
  EngineRun result;
  const int ranks = inputs.plan.parallel.data;
  result.evidence.side = fmt::format("engine {} data {}{}", inputs.plan.precision, ranks, side_suffix);
  result.evidence.unit_roundoff = unit_roundoff(inputs.plan.numerics.storage);
  result.evidence.ranks = ranks;
  result.evidence.input_hashes.resize(static_cast<std::size_t>(ranks));
  result.evidence.replica_hashes.resize(static_cast<std::size_t>(ranks));
  result.measured.spans_by_rank.resize(static_cast<std::size_t>(ranks));
  result.measured.warm_up_steps = 1;
  result.peak_bytes.resize(static_cast<std::size_t>(ranks));
  run_threads_world({.ranks = ranks}, [&](Communicator& comm) { RankRun(inputs, context, comm, result).run(); });
  for (const BytesByCategory& peak : result.peak_bytes) {
    for (std::size_t i = 0; i < kMemoryCategories; ++i) {
      result.measured.peak_bytes[i] = std::max(result.measured.peak_bytes[i], peak[i]);
    }
  }

  const std::int64_t sequence = inputs.data->sequence();
  result.measured.model_flops_per_step =
      static_cast<double>(inputs.plan.batch.rows) * model_flops_per_row(inputs.model, sequence, context.pitfalls);
  const int threads = ranks * inputs.plan.threads_per_rank;
  if (!context.peak_flops_by_threads.empty()) {
    const auto used = std::min(static_cast<std::size_t>(threads), context.peak_flops_by_threads.size());
    result.measured.peak_flops_per_second = context.peak_flops_by_threads[used - 1];
  }
  result.measured.predicted_peak_bytes = predicted_peak(inputs.model, inputs.plan, inputs.optimizer.kind, sequence);
  result.measured.predicted_bytes_on_wire = predicted_gradient_bytes(inputs.model, inputs.plan);
  return result;
}

CaseEvidence compare_with_reference(const PairInputs& inputs, const RunContext& context) {
  CaseEvidence evidence;
  evidence.truth = reference_evidence<double>(inputs, 1, 1);
  evidence.yardstick = reference_evidence<float>(inputs, inputs.plan.parallel.data, inputs.plan.batch.micro_batches);
  EngineRun run = engine_run(inputs, context);
  evidence.candidate = std::move(run.evidence);
  evidence.measured = std::move(run.measured);
  return evidence;
}

BytesByCategory predicted_peak(const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, std::int64_t sequence) {
  const auto element = static_cast<std::int64_t>(size_bytes(plan.numerics.storage));
  const std::int64_t state = num_parameters(model) * element;
  // The first rank and its first micro-batch are the largest (balanced_part).
  const std::int64_t rows = micro_batch_rows(plan.batch.rows, plan.parallel.data, 0, plan.batch.micro_batches, 0).size();
  const std::int64_t tokens = rows * sequence;
  // Per layer and token: 8 hidden-sized values beside the two MLP-wide ones, 4 norm statistics, one logsumexp per head; once the
  // embedding's output, and the final norm's with its two statistics.
  const std::int64_t per_token =
      model.layers * (8 * model.hidden + 2 * model.mlp_width() + 4 + model.heads) + 2 * model.hidden + 2;
  BytesByCategory bytes{};
  bytes[static_cast<std::size_t>(MemoryCategory::parameters)] = state;
  bytes[static_cast<std::size_t>(MemoryCategory::gradients)] = state;
  bytes[static_cast<std::size_t>(MemoryCategory::optimizer)] = optimizer == OptimizerKind::adamw ? 2 * state : 0;
  bytes[static_cast<std::size_t>(MemoryCategory::activations)] = tokens * per_token * element;
  return bytes;
}

std::int64_t predicted_gradient_bytes(const GptConfig& model, const TrainingPlan& plan) {
  const std::int64_t ranks = plan.parallel.data;
  return 2 * (ranks - 1) * num_parameters(model) * static_cast<std::int64_t>(size_bytes(plan.numerics.reduce));
}

}  // namespace tandem

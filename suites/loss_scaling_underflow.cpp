// SPDX-License-Identifier: Apache-2.0
// What loss scaling is for: gradients that vanish in fp16, a task that they alone can teach, and a scaler that runs away.
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "core/rng.h"
#include "reference/loss_scaling.h"
#include "reference/mixed_precision.h"
#include "reference/training.h"
#include "suites/kept_training.h"
#include "suites/loss_scaling_cases.h"
#include "suites/loss_scaling_run.h"
#include "suites/one_step.h"

namespace tandem {
namespace {

using Traced = std::map<std::string, std::vector<double>, std::less<>>;

// ---- a task whose gradients are tiny

// Tokens are drawn evenly and the target is the token two positions back: only attention can know it, without the blocks the loss
// stays at log(16).
class TwoBack final : public BatchSource {
 public:
  explicit TwoBack(std::uint64_t seed) : seed_(seed) {}
  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    Batch batch = make_batch(global_rows, kRow);
    CounterRng rng(seed_ * 100003 + static_cast<std::uint64_t>(step), "two back");
    for (std::int32_t& id : batch.ids) id = static_cast<std::int32_t>(rng.next_below(kTokens));
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      if (i % kRow >= 2) batch.targets[i] = batch.ids[i - 2];
    }
    return slice_rows(batch, rows.begin, rows.size());
  }
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t, std::int64_t) const override { return std::nullopt; }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return kTokens; }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return kRow; }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override { return std::nullopt; }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return std::nullopt; }
  [[nodiscard]] std::string describe() const override { return "the token two positions back"; }

  static constexpr std::int64_t kRow = 8;
  static constexpr std::int64_t kTokens = 16;

 private:
  std::uint64_t seed_;
};

// The residual stream is 1.5e5 times as large as usual, and what reads it ten times smaller. Norms hide that from the forward
// pass, but divide the gradient of the stream by it: about 1e-9 a token, while fp16 ends at 6e-8. With 2e5 the stream itself may
// pass 65504 once the blocks have learnt; with 1e5 enough gradients are left for unscaled fp16 to learn a little.
double growth_of(const std::string& name) {
  if (name == "lm_head.weight") return 0.1;
  const bool stream = name == "wte.weight" || name == "wpe.weight" || name.ends_with("c_proj.weight");
  return stream ? 1.5e5 : 1;
}

void enlarge_stream(Engine& engine) {
  ParameterStore& store = engine.store();
  for (const OwnedPart& part : store.parts()) {
    std::vector<double> values = ParameterStore::values_of(store.memory(), store.master(part));
    for (double& value : values) value = static_cast<float>(value) * static_cast<float>(growth_of(part.shard.global_name));
    store.set_parameter(part.parameter, values);
  }
}

Script tiny_gradients(const std::string& precision, const std::string& mode, std::uint64_t seed, std::int64_t steps = 140) {
  Script script;
  PairInputs& inputs = script.inputs;
  inputs.model = {
      .vocabulary = TwoBack::kTokens, .sequence = TwoBack::kRow, .layers = 1, .hidden = 16, .heads = 1, .mlp_hidden = 32};
  inputs.model.tied = false;
  inputs.plan.precision = precision;
  inputs.plan.numerics = numerics_from_precision(precision);
  inputs.plan.loss_scale.mode = mode;
  inputs.plan.batch = {64, 1};
  inputs.optimizer.learning_rate = 0.003;
  inputs.optimizer.weight_decay = 0;
  inputs.optimizer.max_grad_norm = 0;
  inputs.steps = steps;
  inputs.seed = seed;
  inputs.initialization = Initialization::gpt2;
  inputs.data = std::make_shared<TwoBack>(seed);
  script.prepare = enlarge_stream;
  return script;
}

struct Outcome {
  double last_loss = 0;  ///< mean of the last ten
  double skipped = 0;
};

double mean_of_last(const std::vector<double>& losses) {
  double sum = 0;
  for (std::size_t i = losses.size() - 10; i < losses.size(); ++i) sum += losses[i] / 10;
  return sum;
}

Outcome outcome_of(const Script& script, const RunContext& context) {
  const ScriptedRun run = run_script(script, context, script.inputs.plan.loss_scale.mode);
  return {mean_of_last(run.evidence.losses), static_cast<double>(run.skipped())};
}

Outcome reference_outcome(const Script& script) {
  reference::TrainingRun run = reference_run(script.inputs);
  run.numerics = script.inputs.plan.numerics;
  run.loss_scale = script.inputs.plan.loss_scale;
  auto initial = reference::initial_parameters<float>(run.model, run.initialization, run.seed);
  for (auto& [name, values] : initial) {
    for (float& value : values) value *= static_cast<float>(growth_of(name));
  }
  const auto kept = kept_training<float>(run, initial);
  const reference::TrainingRecord<float>& record = *kept;
  return {mean_of_last(record.losses), static_cast<double>(run.steps - record.updates.back())};
}

void add_outcomes(const std::string& side, const std::function<Outcome(const Script&)>& run, std::uint64_t seed,
                  CaseEvidence& evidence) {
  const auto add = [&](const std::string& what, double value, Relation relation, double limit, const std::string& why) {
    evidence.properties.push_back({fmt::format("{} ({}, seed {})", what, side, seed), value, relation, limit, why, -1, ""});
  };
  const Outcome fp32 = run(tiny_gradients("fp32", "none", seed));
  const Outcome bf16 = run(tiny_gradients("bf16", "auto", seed));
  const Outcome scaled = run(tiny_gradients("fp16", "auto", seed));
  const Outcome unscaled = run(tiny_gradients("fp16", "none", seed));
  add("loss_fp32", fp32.last_loss, Relation::at_most, 0.69, "guessing costs log(16) = 2.77: a quarter of it");
  add("loss_bf16_over_fp32", bf16.last_loss / fp32.last_loss, Relation::at_most, 1.05,
      "bf16 has the range of fp32 and needs no scale");
  add("loss_fp16_scaled_over_fp32", scaled.last_loss / fp32.last_loss, Relation::at_most, 1.05,
      "the scale lifts what would vanish");
  // Where a few gradients are left and most are zero, the steps that are made can end in no number at all.
  const double unscaled_loss = std::isfinite(unscaled.last_loss) ? unscaled.last_loss : std::log(16.0);
  add("loss_fp16_unscaled_over_fp32", unscaled_loss / fp32.last_loss, Relation::at_least, 2.0,
      fmt::format("it ends at {:.3f}: gradients that are zero teach nothing", unscaled.last_loss));
  add("skipped_bf16", bf16.skipped, Relation::equal, 0.0, "nobody looks, nothing overflows");
}

Case outcome_case(bool with_reference, int seeds, bool quick) {
  const std::string name = quick ? "outcome/tiny_gradients" : "outcome/tiny_gradients/reference";
  Case result = loss_scaling_case(name, "fp32, bf16 and scaled fp16 learn what unscaled fp16 cannot", Criterion::convergence,
                                  {.precision = "fp16"}, quick);
  result.execute = [with_reference, seeds](const RunContext& context) {
    CaseEvidence evidence;
    for (int i = 0; i < seeds; ++i) {
      const std::uint64_t seed = context.seed + static_cast<std::uint64_t>(i);
      add_outcomes(
          "engine", [&](const Script& script) { return outcome_of(script, context); }, seed, evidence);
      if (with_reference) add_outcomes("reference", reference_outcome, seed, evidence);
    }
    return evidence;
  };
  return result;
}

// ---- shares of gradients that vanish

Traced traced_gradients(Script script, const RunContext& context) {
  Traced traced;
  script.inputs.steps = 1;
  script.trace = [&traced](const TracedTensor& tensor) {
    if (tensor.name.starts_with("d.h.")) traced[tensor.name] = ParameterStore::values_of(tensor.values);
  };
  static_cast<void>(run_script(script, context, "traced"));
  return traced;
}

// The gradient of a logit is about p / N with p = 1 / V: 2^-9 2^-10 here. The sum over the vocabulary with weights of 0.02 halves
// it, the last norm divides by the size of the stream, 0.03: about 2^-15 is left for the blocks, half of the smallest normal fp16
// number.
Script usual_model(const RunContext& context) {
  ParallelVariant variant{.rows = 16, .layers = 3, .vocabulary = 512, .row_tokens = 64, .dropout = 0.0};
  variant.initialization = Initialization::gpt2;
  Script script;
  script.inputs = inputs_of(variant, context);
  script.inputs.model.sequence = 64;
  return script;
}

std::vector<Property> share_properties(const std::string& of, const Traced& traced, double vanish_at_one) {
  std::vector<Property> all;
  const auto add = [&](const std::string& name, double value, Relation relation, double limit, const std::string& why) {
    all.push_back({fmt::format("{} ({})", name, of), value, relation, limit, why, -1, ""});
  };
  double before = 1;
  double at_one = 0;
  for (const int exponent : {0, 4, 8, 12, 16}) {
    const auto share = reference::underflow_share(traced, DType::f16, std::ldexp(1.0, exponent));
    const std::string name = fmt::format("zero_share_fp16_scale_2^{}", exponent);
    add(name, share.zero, Relation::at_most, before, "what is zero at a larger scale is zero at a smaller one");
    add(fmt::format("infinite_share_fp16_scale_2^{}", exponent), share.infinite, Relation::equal, 0.0,
        "the largest gradient of a logit is 1 / N: no scale up to N 65504 overflows there");
    before = share.zero;
    if (exponent > 0) continue;
    at_one = share.zero + share.subnormal;
    add("zero_or_subnormal_share_fp16_scale_1", at_one, Relation::at_least, vanish_at_one,
        "about 2^-15 in size (2^-30 with the enlarged stream), and 2^-14 is the smallest normal fp16 number");
  }
  const auto scaled = reference::underflow_share(traced, DType::f16, 65536.0);
  add("zero_or_subnormal_share_fp16_scaled", scaled.zero + scaled.subnormal, Relation::at_most, 0.5 * at_one,
      "2^16 lifts them by sixteen binades");
  const auto brain = reference::underflow_share(traced, DType::bf16);
  add("zero_or_subnormal_share_bf16", brain.zero + brain.subnormal, Relation::equal, 0.0,
      "bf16 has the exponents of fp32, down to 2^-126");
  return all;
}

Case underflow_case() {
  Case result =
      loss_scaling_case("underflow/shares", "gradients of activations that vanish in fp16 unscaled, scaled, and in bf16",
                        Criterion::convergence, {.precision = "fp16"});
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    evidence.properties = share_properties("usual model", traced_gradients(usual_model(context), context), 0.25);
    const auto tiny =
        share_properties("tiny gradients", traced_gradients(tiny_gradients("fp32", "none", context.seed), context), 0.5);
    evidence.properties.insert(evidence.properties.end(), tiny.begin(), tiny.end());
    return evidence;
  };
  return result;
}

// ---- one step of scaled fp16 moves what fp32 moves

// Adam's first update has the size of the learning rate wherever the gradient is not zero, so that counting what moved counts
// what survived from the loss to the update.
double moved_by_one_step(const std::string& precision, const std::string& mode, const RunContext& context) {
  Script script = tiny_gradients(precision, mode, context.seed, 1);
  script.inputs.optimizer.epsilon = 1e-15;  // below every gradient here
  const ScriptedRun run = run_script(script, context, mode);
  const StageEvidence& before = run.evidence.stages[0];
  const StageEvidence& after = run.evidence.stages[1];
  double moved = 0;
  for (std::size_t t = 0; t < before.tensors.size(); ++t) {
    for (std::size_t i = 0; i < before.tensors[t].values.size(); ++i) {
      moved += std::fabs(after.tensors[t].values[i] - before.tensors[t].values[i]) > 0.5 * script.inputs.optimizer.learning_rate
                   ? 1
                   : 0;
    }
  }
  return moved;
}

Case survival_case() {
  Case result = loss_scaling_case("underflow/survives_to_the_update", "a scaled gradient is still there when it is applied",
                                  Criterion::convergence, {.precision = "fp16"});
  result.execute = [](const RunContext& context) {
    const double in_fp32 = moved_by_one_step("fp32", "none", context);
    CaseEvidence evidence;
    evidence.properties = {
        {"weights_moved_of_those_in_fp32", moved_by_one_step("fp16", "auto", context) / in_fp32, Relation::at_least, 0.9,
         "scaled by 65536 gradients are normal fp16 numbers from the loss to the parameters, and divided in fp32", 0, ""},
        {"weights_moved_of_those_in_fp32 without scale", moved_by_one_step("fp16", "none", context) / in_fp32, Relation::at_most,
         0.5, "most are zero by then", 0, ""}};
    return evidence;
  };
  return result;
}

// ---- the literal sketch

// A long stable run: what overflows is a scaled gradient beyond the largest fp16 number.
template <class Scaler>
double skips_of(Scaler scaler, std::int64_t steps, double largest_gradient) {
  double skips = 0;
  for (std::int64_t s = 0; s < steps; ++s) skips += scaler.finish_step(scaler.scale() * largest_gradient > 65504) ? 0 : 1;
  return skips;
}

// The task above with growth every 40 steps; on the literal side the engine's scale is set from the sketch before every step.
constexpr std::int64_t kInterval = 40;

double skips_of_training(bool literal, const RunContext& context) {
  Script script = tiny_gradients("fp16", "dynamic", context.seed);
  script.inputs.plan.loss_scale.growth_interval = literal ? 1000000 : kInterval;
  auto sketch = std::make_shared<reference::LiteralLossScaler>(65536.0, kInterval);
  if (literal) {
    script.before_step = [sketch, skipped = std::int64_t{0}](Engine& engine, std::int64_t step) mutable {
      const std::int64_t now = engine.loss_scaler().skipped_steps();
      if (step > 0) static_cast<void>(sketch->finish_step(now > skipped));
      skipped = now;
      engine.loss_scaler().set_state({sketch->scale(), 0, now});
    };
  }
  return static_cast<double>(run_script(script, context, literal ? "sketch" : "rule").skipped());
}

Case literal_case() {
  Case result =
      loss_scaling_case("literal_sketch", "a count that nothing resets doubles the scale at every step and skips every second",
                        Criterion::convergence, {.precision = "fp16"});
  result.execute = [](const RunContext& context) {
    // From 2^16 five growths lead to 2^21 after 10000 steps; 2^16 times the gradient's room of 2^8 is 2^24.
    const double largest = 65504 / 0x1p24;
    CaseEvidence evidence;
    evidence.properties = {{"skips_of_the_rule in 10000 stable steps", skips_of(reference::DynamicLossScaler(), 10000, largest),
                            Relation::equal, 0.0, "five growths: 2^21, below 2^24", -1, ""},
                           {"skips_of_the_sketch in 10000 stable steps", skips_of(reference::LiteralLossScaler(), 10000, largest),
                            Relation::at_least, 3990, "from step 2009 on every second step: (10000 - 2010) / 2", -1, ""},
                           {"skips_of_the_rule in training", skips_of_training(false, context), Relation::equal, 0.0,
                            "three growths: 2^19 times a gradient of a logit of at most 1 / 384 is far within fp16", -1, ""},
                           {"skips_of_the_sketch in training", skips_of_training(true, context), Relation::at_least, 36,
                            "at most ten doublings after step 40, then every second of 90 steps, less a fifth", -1, ""}};
    return evidence;
  };
  return result;
}

}  // namespace

void add_underflow_cases(CaseList& cases) {
  cases.push_back(underflow_case());
  cases.push_back(survival_case());
  cases.push_back(outcome_case(false, 1, true));
  cases.push_back(outcome_case(true, 3, false));
  cases.push_back(literal_case());
}

}  // namespace tandem

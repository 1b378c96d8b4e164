// SPDX-License-Identifier: Apache-2.0
// The scale drops out of an update, and an overflow on one rank is every rank's.
#include <cmath>

#include <fmt/format.h>

#include "reference/loss_scaling.h"
#include "reference/optimizer.h"
#include "reference/training.h"
#include "suites/evidence_stage.h"
#include "suites/kept_training.h"
#include "suites/loss_scaling_cases.h"
#include "suites/loss_scaling_run.h"
#include "suites/one_step.h"
#include "suites/overflow_script.h"

namespace tandem {
namespace {

// ---- the scale drops out

LossScaleConfig scale_of(const std::string& mode, double initial) {
  LossScaleConfig config;
  config.mode = mode;
  config.initial = initial;
  config.growth_interval = 1;  // a dynamic scale doubles after every step
  return config;
}

Script sgd_script(ParallelVariant variant, const LossScaleConfig& scale, const RunContext& context) {
  variant.loss_scale = scale;
  Script script;
  script.inputs = inputs_of(variant, context);
  script.inputs.optimizer.kind = OptimizerKind::sgd;
  script.inputs.optimizer.max_grad_norm = 0.1;
  script.inputs.optimizer.learning_rate = 0.05;
  script.inputs.steps = 4;
  return script;
}

// In fp32 nothing but the exponent of a gradient changes with a scale that is a power of two, and dividing by it gives it back.
Case invariance_case(const std::string& name, const ParallelVariant& variant, const LossScaleConfig& scale) {
  Case result = loss_scaling_case("scale/" + name, "the same update and norm whatever the scale", Criterion::bitwise, variant);
  result.execute = [variant, scale](const RunContext& context) {
    CaseEvidence evidence;
    evidence.truth = run_script(sgd_script(variant, scale_of("none", 1), context), context, "without scale").evidence;
    ScriptedRun run = run_script(sgd_script(variant, scale, context), context, fmt::format("scale {}", scale.initial));
    evidence.properties = {
        ranks_agree(run),
        {"steps_not_clipped", count_steps(run, [](const RankStep& s) { return !(s.result.clip_coefficient < 1); }),
         Relation::equal, 0.0, "max_grad_norm is far below the norm: a norm in other units would clip otherwise", -1, ""},
        {"skipped_steps", static_cast<double>(run.skipped()), Relation::equal, 0.0, "fp32 holds every scaled gradient", -1, ""}};
    evidence.candidate = std::move(run.evidence);
    return evidence;
  };
  return result;
}

// ---- overflows

constexpr std::int64_t kMicroScale = 1024;

ParallelVariant overflow_variant(ParallelVariant variant) {
  if (variant.precision == "fp32") variant.precision = "fp16";
  variant.loss_scale.initial = kMicroScale;
  variant.loss_scale.growth_interval = 2;
  return variant;
}

bool overflows_somewhere(const Script& script, std::int64_t step) {
  for (int rank = 0; rank < script.inputs.plan.parallel.world_size(); ++rank) {
    if (script.overflows(rank, step)) return true;
  }
  return false;
}

// Every second step one rank overflows, each in its turn, twice in a row at the end of the round.
Script overflow_script(const ParallelVariant& variant, const std::string& spoiled, const std::vector<int>& ranks,
                       const RunContext& context) {
  Script script;
  script.inputs = inputs_of(variant, context);
  script.inputs.steps = 2 * static_cast<std::int64_t>(ranks.size()) + 2;
  script.inputs.schedule = {ScheduleKind::cosine, 2, 0, 0.1};
  script.spoiled = spoiled;
  script.overflows = [ranks](int rank, std::int64_t step) {
    const auto turn = static_cast<std::size_t>(step / 2);
    return step % 2 == 1 && turn < ranks.size() && ranks[turn] == rank;
  };
  return script;
}

}  // namespace

Script without_overflows(const Script& script) {
  Script twin = script;
  twin.overflows = {};
  twin.left_out = [script](std::int64_t step) { return overflows_somewhere(script, step); };
  twin.before_step = [script](Engine& engine, std::int64_t step) {
    const LossScaleConfig& config = script.inputs.plan.loss_scale;
    reference::DynamicLossScaler scaler({config.initial, config.growth_factor, config.backoff_factor, config.growth_interval});
    LossScalerState state;
    for (std::int64_t s = 0; s < step; ++s) state.skipped_steps += scaler.finish_step(overflows_somewhere(script, s)) ? 0 : 1;
    state.scale = scaler.scale();
    state.growth_tracker = scaler.growth_tracker();
    engine.loss_scaler().set_state(state);
  };
  return twin;
}

namespace {

struct Expected {
  std::vector<LossScalerState> after;
  std::vector<std::int64_t> updates;  // after
  std::vector<double> learning_rates;
};

Expected expected_steps(const Script& script) {
  const LossScaleConfig& config = script.inputs.plan.loss_scale;
  reference::DynamicLossScaler scaler({config.initial, config.growth_factor, config.backoff_factor, config.growth_interval});
  Expected expected;
  std::int64_t updates = 0;
  for (std::int64_t step = 0; step < script.inputs.steps; ++step) {
    expected.learning_rates.push_back(
        reference::learning_rate(script.inputs.optimizer, script.inputs.schedule, updates, script.inputs.steps));
    if (scaler.finish_step(overflows_somewhere(script, step))) ++updates;
    expected.updates.push_back(updates);
    expected.after.push_back({scaler.scale(), scaler.growth_tracker(), step + 1 - updates});
  }
  return expected;
}

// States that a skipped step has changed, over all ranks.
double changed_by_skips(const ScriptedRun& run, const Script& script) {
  double changed = 0;
  for (std::size_t rank = 0; rank < run.steps.size(); ++rank) {
    std::uint64_t before = run.start[rank].state_hash;
    for (const RankStep& step : run.steps[rank]) {
      if (overflows_somewhere(script, step.step) && step.state_hash != before) ++changed;
      before = step.state_hash;
    }
  }
  return changed;
}

}  // namespace

std::vector<Property> overflow_properties(const Script& script, const ScriptedRun& run) {
  const Expected expected = expected_steps(script);
  const auto at = [](const RankStep& s) { return static_cast<std::size_t>(s.step); };
  const auto none = [&](const char* name, const std::function<bool(const RankStep&)>& bad, const char* derivation) {
    return Property{name, count_steps(run, bad), Relation::equal, 0.0, derivation, -1, ""};
  };
  return {ranks_agree(run),
          none(
              "wrong_decisions", [&](const RankStep& s) { return s.result.skipped != overflows_somewhere(script, s.step); },
              "a step is skipped on all ranks if one rank's gradients are not finite, else on none"),
          none(
              "wrong_scales", [&](const RankStep& s) { return !(s.scaler == expected.after[at(s)]); },
              "scale, counter and skipped steps of the rule (reference/loss_scaling.h)"),
          none(
              "wrong_update_counts", [&](const RankStep& s) { return s.updates != expected.updates[at(s)]; },
              "a skipped step is no update"),
          none(
              "wrong_learning_rates",
              [&](const RankStep& s) {
                return std::fabs(s.result.learning_rate - expected.learning_rates[at(s)]) >
                       1e-12 * expected.learning_rates[at(s)];
              },
              "the schedule counts updates"),
          {"states_changed_by_skips", changed_by_skips(run, script), Relation::equal, 0.0,
           "stored parameters, masters and moments of every rank keep every bit", -1, ""},
          {"skipped_steps", static_cast<double>(run.skipped()), Relation::at_least, 1.0, "the script has overflows", -1, ""}};
}

namespace {

Case overflow_case(const std::string& name, ParallelVariant variant, const std::string& spoiled, const std::vector<int>& ranks) {
  variant = overflow_variant(variant);
  Case result =
      loss_scaling_case("overflow/" + name,
                        fmt::format("not finite on one rank, {} in turn: all skip, and go on as if the batch alone were used up",
                                    ranks.size() == 1 ? "one" : fmt::format("{} ranks", ranks.size())),
                        Criterion::bitwise, variant);
  result.execute = [variant, spoiled, ranks](const RunContext& context) {
    const Script script = overflow_script(variant, spoiled, ranks, context);
    CaseEvidence evidence;
    evidence.truth = run_script(without_overflows(script), context, "without the skipped steps").evidence;
    ScriptedRun run = run_script(script, context, "with overflows");
    evidence.properties = overflow_properties(script, run);
    evidence.candidate = std::move(run.evidence);
    return evidence;
  };
  return result;
}

// ---- beside the reference

template <class Real>
StageEvidence stage_of(const PairInputs& inputs, std::string_view name, int step, const reference::NamedTensors<Real>& tensors) {
  std::vector<StageTensor> list;
  for (const ParameterSpec& spec : gpt_parameters(inputs.model)) {
    const std::vector<Real>& values = tensors.at(spec.name);
    list.push_back({spec.name, {values.begin(), values.end()}});
  }
  return make_stage(inputs, name, step, std::move(list));
}

// The stages of run_script() from a run of the reference, its skipped steps left out of the series.
template <class Real>
Evidence reference_side(const PairInputs& inputs, const reference::TrainingRecord<Real>& record, const std::string& side,
                        double roundoff) {
  Evidence evidence;
  evidence.side = side;
  evidence.unit_roundoff = roundoff;
  const auto last = static_cast<int>(inputs.steps) - 1;
  evidence.stages = {stage_of(inputs, kInitialParameters, 0,
                              reference::initial_parameters<Real>(inputs.model, inputs.initialization, inputs.seed)),
                     stage_of(inputs, "script_parameters", last, record.parameters),
                     stage_of(inputs, "first_moments", last, record.optimizer.m),
                     stage_of(inputs, "second_moments", last, record.optimizer.v)};
  const auto add = [&](std::string_view stage, const std::string& name, const std::vector<double>& all) {
    std::vector<double> kept;
    for (std::size_t s = 0; s < all.size(); ++s) {
      if (!record.skipped[s]) kept.push_back(all[s]);
    }
    if (stage == kLosses) evidence.losses = kept;
    evidence.stages.push_back(make_stage(inputs, stage, last, {{name, std::move(kept)}}));
  };
  add(kLosses, "loss of steps that updated", record.losses);
  add(kGradientNorms, "gradient norm of steps that updated", record.gradient_norms);
  add("learning_rates", "learning rate of steps that updated", record.learning_rates);
  return evidence;
}

// The reference in double that has the batches of the steps which updated, and no others.
Evidence truth_of_updates(const PairInputs& inputs, const std::vector<bool>& skipped) {
  std::vector<std::int64_t> kept;
  for (std::size_t s = 0; s < skipped.size(); ++s) {
    if (!skipped[s]) kept.push_back(static_cast<std::int64_t>(s));
  }
  reference::TrainingRun run = reference_run(inputs);
  run.steps = static_cast<std::int64_t>(kept.size());
  run.batch = [&](std::int64_t step) {
    return inputs.data->training_batch(kept[static_cast<std::size_t>(step)], inputs.plan.batch.rows);
  };
  return reference_side(inputs, *kept_training<double>(run), "reference fp64 without the skipped steps", 0x1p-53);
}

// A scale of 2^26 takes gradients beyond fp16 on its own: nothing is planted, and the reference overflows as well. Without
// dropout, whose masks know the number of the step.
Case natural_overflow_case() {
  ParallelVariant variant{.degrees = {.data = 2}, .micro_batches = 2, .dropout = 0.0, .precision = "fp16"};
  variant.loss_scale.initial = 0x1p26;
  variant.loss_scale.growth_interval = 3;
  Case result = loss_scaling_case("overflow/natural/fp16", "a scale that is too large, step by step as the reference",
                                  Criterion::rounding, variant);
  result.execute = [variant](const RunContext& context) {
    Script script;
    script.inputs = inputs_of(variant, context);
    script.inputs.steps = 24;
    reference::TrainingRun same = reference_run(script.inputs);
    same.layout = {variant.degrees.data, variant.micro_batches};
    same.numerics = script.inputs.plan.numerics;
    same.loss_scale = script.inputs.plan.loss_scale;
    const auto kept = kept_training<float>(same);
    const reference::TrainingRecord<float>& record = *kept;
    ScriptedRun run = run_script(script, context, "too large a scale");
    const auto at = [](const RankStep& s) { return static_cast<std::size_t>(s.step); };
    const auto differs = [&](const RankStep& s) {
      return s.result.loss_scale != record.loss_scales[at(s)] || s.result.skipped != record.skipped[at(s)] ||
             s.updates != record.updates[at(s)];
    };
    CaseEvidence evidence;
    evidence.properties = {
        ranks_agree(run),
        {"steps_unlike_the_reference", count_steps(run, differs), Relation::equal, 0.0,
         "scale, decision, updates: the same gradients pass the largest fp16 number, by more than rounding", -1, ""},
        {"skipped_steps", static_cast<double>(run.skipped()), Relation::at_least, 2.0, "the scale starts far too large", -1, ""},
        {"updates", static_cast<double>(run.steps.front().back().updates), Relation::at_least, 4.0, "and comes down", -1, ""}};
    evidence.truth = truth_of_updates(script.inputs, record.skipped);
    evidence.yardstick = reference_side(script.inputs, record, "reference fp16", unit_roundoff(DType::f16));
    evidence.candidate = std::move(run.evidence);
    return evidence;
  };
  return result;
}

}  // namespace

void add_scale_invariance_cases(CaseList& cases) {
  const ParallelVariant alone{.micro_batches = 3};
  cases.push_back(invariance_case("static1/fp32", alone, scale_of("static", 1)));
  cases.push_back(invariance_case("static256/fp32", alone, scale_of("static", 0x1p8)));
  cases.push_back(invariance_case("static65536/fp32", alone, scale_of("static", 0x1p16)));
  cases.push_back(invariance_case("growing/fp32", alone, scale_of("dynamic", 0x1p8)));
  // The gradient of the load-balancing loss does not pass through the loss of tokens: it has the scale from elsewhere.
  const ParallelVariant routed{.degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 2};
  cases.push_back(invariance_case("static256/data2/expert2/fp32", routed, scale_of("static", 0x1p8)));
  const ParallelVariant grid{.degrees = {.data = 2, .tensor = 2}, .zero_stage = 2};
  cases.push_back(invariance_case("growing/data2/tensor2/zero2/fp32", grid, scale_of("dynamic", 0x1p16)));
}

void add_overflow_cases(CaseList& cases) {
  const ParallelVariant grid{.degrees = {.data = 2, .tensor = 2, .pipeline = 2}, .micro_batches = 2};
  cases.push_back(overflow_case("data2/tensor2/pipeline2/fp16", grid, "", {0, 1, 2, 3, 4, 5, 6, 7}));
  const ParallelVariant replicas{.degrees = {.data = 2, .tensor = 2}};
  cases.push_back(overflow_case("data2/tensor2/replicated/fp16", replicas, "ln_f.weight", {1, 3}));
  for (const int stage : {1, 2, 3}) {
    cases.push_back(overflow_case(fmt::format("data3/zero{}/fp16", stage),
                                  {.degrees = {.data = 3}, .micro_batches = 2, .zero_stage = stage}, "", {0, 1, 2}));
  }
  cases.push_back(
      overflow_case("data2/zero1/offload/fp16", {.degrees = {.data = 2}, .zero_stage = 1, .offload = "optimizer"}, "", {1, 0}));
  cases.push_back(overflow_case("context2/fp16", {.degrees = {.context = 2}}, "", {0, 1}));
  cases.push_back(
      overflow_case("data2/expert2/fp16", {.degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 2}, "experts", {0, 1}));
  cases.push_back(natural_overflow_case());
}

}  // namespace tandem

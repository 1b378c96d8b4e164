// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/update_gate.h"

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <gtest/gtest.h>

#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"

namespace tandem {
namespace {

constexpr std::int64_t kSteps = 4, kRows = 5;

GptConfig small_model() {
  GptConfig model;
  model.vocabulary = 24;
  model.sequence = 8;
  model.layers = 2;
  model.hidden = 16;
  model.heads = 2;
  model.residual_dropout = 0.1;
  return model;
}

TrainingPlan plan_of(const std::string& precision, ParallelDegrees degrees) {
  TrainingPlan plan;
  plan.parallel = degrees;
  plan.batch = {kRows, 2};
  plan.precision = precision;
  plan.numerics = numerics_from_precision(precision);
  plan.loss_scale.growth_interval = 2;
  return plan;
}

// What happened on each rank.
struct GatedRun {
  std::map<int, std::vector<std::vector<double>>> parameters;  // by rank, of each local tensor
  std::vector<StepResult> results;
  std::map<int, std::vector<UpdateSigns>> signs;
};

struct GateScript {
  UpdateDecision at_step_2{};  // the first time that it is asked about it
  bool poisons_activation = false, poisons_gradient = false;
  int poisoned_rank = 0;
};

GatedRun run_gated(const TrainingPlan& plan, const GateScript& script) {
  const GptConfig model = small_model();
  const SyntheticCorpus corpus({.vocabulary = model.vocabulary, .sequence = model.sequence, .row_shape = RowShape::skewed});
  GatedRun run;
  std::mutex mutex;
  run_world({.ranks = plan.parallel.world_size()}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    bool asked = false, struck = false;
    const auto strike = [&](std::int64_t step, TensorView values) {
      if (step != 2 || comm.rank() != script.poisoned_rank || std::exchange(struck, true)) return;
      kernels->fill(values.flat(values.num_elements() / 2, 1), std::numeric_limits<double>::quiet_NaN());
    };
    EngineOptions options{model, plan, {}, {.warmup_steps = 3}, kSteps, 5};
    options.gate = [&](const UpdateSigns& signs) {
      {
        const std::scoped_lock lock(mutex);
        run.signs[comm.rank()].push_back(signs);
      }
      return signs.step == 2 && !std::exchange(asked, true) ? script.at_step_2 : UpdateDecision();
    };
    if (script.poisons_activation) {
      options.on_activation = [&](std::int64_t step, int, TensorView output) { strike(step, output); };
    }
    if (script.poisons_gradient) options.touch_gradients = strike;
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}}, options);
    engine.store().initialise(model, Initialization::scattered, 5);
    for (std::int64_t step = 0; step < kSteps; ++step) {
      StepResult result = engine.train_step(corpus.training_batch(step, kRows), step);
      if (result.retry) result = engine.train_step(corpus.training_batch(step, kRows), step);
      if (comm.rank() == 0) run.results.push_back(result);
    }
    std::vector<std::vector<double>> values;
    for (const OwnedPart& part : engine.store().parts()) {
      values.push_back(ParameterStore::values_of(engine.store().master(part)));
      values.push_back(ParameterStore::values_of(engine.store().second_moment(part)));
    }
    const std::scoped_lock lock(mutex);
    run.parameters[comm.rank()] = values;
  });
  return run;
}

struct GatedPlan {
  std::string name;
  TrainingPlan plan;
};

std::vector<GatedPlan> gated_plans() {
  std::vector<GatedPlan> plans = {
      {"data", plan_of("fp32", {.data = 3})},         {"tensor", plan_of("fp32", {.data = 2, .tensor = 2})},
      {"pipeline", plan_of("bf16", {.pipeline = 2})}, {"context", plan_of("fp32", {.context = 2})},
      {"scaled", plan_of("fp16", {.data = 2})},       {"fp8", plan_of("fp8", {.data = 2})}};
  plans.push_back({"dealt", plan_of("fp32", {.data = 3})});
  plans.back().plan.zero_stage = 3;
  plans.push_back({"compressed", plan_of("fp32", {.data = 2})});
  plans.back().plan.compression.codec = "top_k";
  plans.push_back({"overlapped", plan_of("fp32", {.data = 2})});
  plans.back().plan.overlap.gradients = true;
  plans.back().plan.buckets.bucket_bytes = 2000;
  return plans;
}

class UpdateGate : public testing::TestWithParam<GatedPlan> {};

TEST_P(UpdateGate, AStepThatIsComputedAgainLeavesNoTrace) {
  const GatedRun undisturbed = run_gated(GetParam().plan, {});
  // With a scaler, NaN is an overflow and never comes to the gate.
  const bool poisons = GetParam().name != "scaled";

  const GatedRun run = run_gated(GetParam().plan, {{UpdateDecision::Kind::retry}, poisons, false, 0});

  EXPECT_EQ(run.parameters, undisturbed.parameters);
  EXPECT_EQ(run.results.back().loss, undisturbed.results.back().loss);
  EXPECT_EQ(run.results.back().loss_scale, undisturbed.results.back().loss_scale);
  EXPECT_EQ(run.signs.at(0).size(), undisturbed.signs.at(0).size() + 1);
  EXPECT_EQ(std::isfinite(run.signs.at(0)[2].gradient_norm), !poisons);
}

TEST_P(UpdateGate, AStepThatIsLeftOutChangesNothingAndIsNotCounted) {
  const GatedRun undisturbed = run_gated(GetParam().plan, {});

  const GatedRun run = run_gated(GetParam().plan, {{UpdateDecision::Kind::skip}, GetParam().name != "scaled", false, 0});

  EXPECT_TRUE(run.results[2].skipped);
  EXPECT_NE(run.parameters, undisturbed.parameters);
  EXPECT_EQ(run.results[3].learning_rate, undisturbed.results[2].learning_rate) << "the schedule counts updates";
  for (const double value : run.parameters.at(0).front()) ASSERT_TRUE(std::isfinite(value));
}

INSTANTIATE_TEST_SUITE_P(Plans, UpdateGate, testing::ValuesIn(gated_plans()), [](const auto& test) { return test.param.name; });

TEST(UpdateGateSigns, NameTheRankWhoseOwnGradientIsNotFinite) {
  for (const int zero_stage : {0, 2}) {
    for (int rank = 0; rank < 3; ++rank) {
      TrainingPlan plan = plan_of("fp32", {.data = 3});
      plan.zero_stage = zero_stage;
      const GatedRun run = run_gated(plan, {{UpdateDecision::Kind::retry}, false, true, rank});
      for (int other = 0; other < 3; ++other) {
        EXPECT_EQ(run.signs.at(other)[2].gradient_is_finite, other != rank) << "rank " << rank;
        EXPECT_FALSE(std::isfinite(run.signs.at(other)[2].gradient_norm)) << "it is everywhere once it is summed";
        EXPECT_TRUE(run.signs.at(other)[3].gradient_is_finite);
      }
    }
  }
}

TEST(UpdateGateSigns, AddUpToTheLossOfTheStep) {
  const GatedRun run = run_gated(plan_of("fp64", {.data = 2, .tensor = 2}), {});
  for (std::size_t step = 0; step < kSteps; ++step) {
    double sum = 0;
    for (const auto& [rank, signs] : run.signs) sum += signs[step].loss_sum;
    EXPECT_DOUBLE_EQ(sum / static_cast<double>(run.signs.at(0)[step].valid_tokens), run.results[step].loss);
    EXPECT_EQ(run.signs.at(3)[step].gradient_norm, run.results[step].gradient_norm);
  }
}

TEST(UpdateGateDecision, ClipsHarderByTheFactorThatItIsTold) {
  const TrainingPlan plan = plan_of("fp64", {.data = 2});
  const GatedRun plain = run_gated(plan, {});
  const GatedRun clipped = run_gated(plan, {{UpdateDecision::Kind::apply, 0.25}, false, false, 0});

  EXPECT_EQ(clipped.results[2].clip_coefficient, plain.results[2].clip_coefficient * 0.25);
  EXPECT_EQ(clipped.results[1].clip_coefficient, plain.results[1].clip_coefficient);
  EXPECT_NE(clipped.parameters, plain.parameters);
}

}  // namespace
}  // namespace tandem

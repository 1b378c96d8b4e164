// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "reference/mixed_precision.h"
#include "reference/test_support.h"
#include "reference/training.h"

namespace tandem::reference {
namespace {

TrainingRun small_run(const char* precision) {
  TrainingRun run;
  run.model = {.vocabulary = 11, .sequence = 6, .layers = 2, .hidden = 8, .heads = 2, .mlp_hidden = 12};
  run.steps = 6;
  run.seed = 5;
  run.initialization = Initialization::scattered;
  run.numerics = numerics_from_precision(precision);
  run.batch = [model = run.model](std::int64_t step) {
    return ragged_batch(model, 6, {6, 1, 4, 0, 3}, static_cast<std::uint64_t>(step));
  };
  return run;
}

template <class Real>
std::size_t num_moved(const NamedTensors<Real>& before, const NamedTensors<Real>& after) {
  std::size_t moved = 0;
  for (const auto& [name, values] : before) {
    for (std::size_t i = 0; i < values.size(); ++i) moved += values[i] != after.at(name)[i] ? 1U : 0U;
  }
  return moved;
}

TEST(MixedTraining, TakesTheSameStepWhateverTheScale) {
  TrainingRun run = small_run("fp32");
  run.optimizer.kind = OptimizerKind::sgd;
  run.optimizer.max_grad_norm = 0.01;
  const TrainingRecord<float> expected = train<float>(run);
  EXPECT_LT(expected.clip_coefficients[0], 1.0);

  run.loss_scale.mode = "static";
  for (const double scale : {0x1p0, 0x1p8, 0x1p16}) {
    run.loss_scale.initial = scale;
    const TrainingRecord<float> got = train<float>(run);
    EXPECT_EQ(got.loss_scales, std::vector<double>(6, scale));
    EXPECT_EQ(got.gradient_norms, expected.gradient_norms) << scale;
    EXPECT_EQ(got.gradients_step0, expected.gradients_step0) << scale;
    EXPECT_EQ(got.parameters, expected.parameters) << scale;
  }
}

TEST(MixedTraining, AnOverflowSkipsTheUpdateAndNothingElse) {
  TrainingRun run = small_run("fp16");
  run.schedule = {ScheduleKind::cosine, 3, 0, 0.1};
  run.loss_scale.initial = 0x1p24;
  run.loss_scale.growth_interval = 2;
  const NamedTensors<float> initial = initial_parameters<float>(run.model, run.initialization, run.seed);

  const TrainingRecord<float> record = train<float>(run, initial);

  std::int64_t updates = 0;
  for (std::size_t s = 0; s < 6; ++s) {
    if (!record.skipped[s]) ++updates;
    EXPECT_EQ(record.updates[s], updates);
    EXPECT_EQ(std::isfinite(record.gradient_norms[s]), !record.skipped[s]);
    const std::int64_t before = updates - (record.skipped[s] ? 0 : 1);
    EXPECT_EQ(record.learning_rates[s], learning_rate(run.optimizer, run.schedule, before, 6)) << "the schedule counts updates";
  }
  ASSERT_TRUE(record.skipped[0]) << "a scale of 2^24 takes the gradient of a logit beyond fp16";
  EXPECT_EQ(record.loss_scales[1], 0x1p23);
  EXPECT_EQ(record.parameters_step1, initial);
  EXPECT_GT(updates, 0);
  EXPECT_LT(updates, 6);
  EXPECT_EQ(record.optimizer.updates, updates);

  // A run of nothing but skipped steps leaves everything as it was, though it has used its batches.
  run.steps = 1;
  const TrainingRecord<float> skipped = train<float>(run, initial);
  EXPECT_EQ(skipped.parameters, initial);
  EXPECT_EQ(skipped.optimizer.m, zero_tensors<float>(run.model));
  EXPECT_EQ(skipped.optimizer.v, zero_tensors<float>(run.model));
  EXPECT_EQ(skipped.loss_scale, 0x1p23);
}

TEST(MixedTraining, AppliesAnOverflowWhereNobodyLooksForIt) {
  TrainingRun run = small_run("fp16");
  run.loss_scale.mode = "none";
  run.steps = 1;
  NamedTensors<float> initial = initial_parameters<float>(run.model, run.initialization, run.seed);
  initial.at("ln_f.weight")[0] = 1e6F;

  const TrainingRecord<float> record = train<float>(run, initial);

  EXPECT_FALSE(record.skipped[0]);
  EXPECT_FALSE(all_finite(record.parameters));
}

TEST(MixedTraining, ComputesWithRoundedMasters) {
  TrainingRun run = small_run("bf16");
  run.optimizer.learning_rate = 1e-5;
  const NamedTensors<float> initial = initial_parameters<float>(run.model, run.initialization, run.seed);
  const TrainingRecord<float> with_masters = train<float>(run, initial);
  run.numerics.master = DType::bf16;
  const TrainingRecord<float> without = train<float>(run, initial);

  EXPECT_EQ(with_masters.losses[0], without.losses[0]);
  NamedTensors<float> start = initial;
  const std::size_t all = num_moved(start, with_masters.parameters);
  round_all(DType::bf16, start);
  const std::size_t moved = num_moved(start, without.parameters);
  EXPECT_LT(moved, all / 2) << "an update of 1e-5 is below half a unit of most bf16 parameters";
  NamedTensors<float> at_rest = without.parameters;
  round_all(DType::bf16, at_rest);
  EXPECT_EQ(at_rest, without.parameters);
}

TEST(MixedTraining, KeepsStoredGradientsInSixteenBits) {
  TrainingRun run = small_run("bf16");
  run.layout = {2, 2};
  const TrainingRecord<float> wide = train<float>(run);
  run.numerics.accumulate = run.numerics.reduce = DType::bf16;
  const TrainingRecord<float> stored = train<float>(run);

  NamedTensors<float> rounded_ones = stored.gradients_step0;
  round_all(DType::bf16, rounded_ones);
  EXPECT_EQ(rounded_ones, stored.gradients_step0);
  EXPECT_NE(wide.gradients_step0, stored.gradients_step0);
  const NamedTensors<double> expected = converted<double>(wide.gradients_step0);
  for (const auto& [name, values] : expected) {
    if (name.ends_with("c_attn.bias")) continue;  // its keys' third is rounding alone
    // Three roundings of sums over four micro-batches, whose parts may cancel.
    EXPECT_LT(relative_l2(stored.gradients_step0.at(name), values), 8 * 0x1p-9) << name;
  }
}

TEST(MixedTraining, IsIndependentOfTheLayoutUpToRounding) {
  for (const char* precision : {"bf16", "fp16", "bf16-autocast", "fp8"}) {
    TrainingRun run = small_run(precision);
    run.optimizer.kind = OptimizerKind::sgd;
    run.steps = 1;
    const TrainingRecord<double> one = train<double>(run);
    run.layout = {3, 2};
    const TrainingRecord<double> many = train<double>(run);

    // What a row computes does not depend on the rows beside it, and sums are wide.
    for (const auto& [name, values] : one.gradients_step0) {
      EXPECT_LE(relative_l2(many.gradients_step0.at(name), values), 1e-11) << precision << " " << name;
    }
  }
}

/// Tokens are drawn evenly and the target is the token two positions back, so that only attention can know it: without the blocks
/// the loss stays at log(16). The residual stream is about 4000 times as large as usual and its readout ten times smaller.
/// Normalisation hides that from the forward pass, but the gradient of the stream is divided by it: about 1e-9 a token.
TrainingRun run_with_tiny_gradients(const char* precision, const char* loss_scale) {
  TrainingRun run;
  run.model = {.vocabulary = 16, .sequence = 8, .layers = 1, .hidden = 16, .heads = 1, .mlp_hidden = 32, .tied = false};
  run.steps = 140;
  run.optimizer.learning_rate = 0.003;
  run.optimizer.weight_decay = 0.0;
  run.optimizer.max_grad_norm = 0.0;
  run.numerics = numerics_from_precision(precision);
  run.loss_scale.mode = loss_scale;
  run.batch = [](std::int64_t step) {
    Batch batch = make_batch(64, 8);
    CounterRng rng(static_cast<std::uint64_t>(step), "t");
    for (std::int32_t& id : batch.ids) id = static_cast<std::int32_t>(rng.next_below(16));
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      if (i % 8 >= 2) batch.targets[i] = batch.ids[i - 2];
    }
    return batch;
  };
  return run;
}

NamedTensors<float> parameters_with_tiny_gradients(const GptConfig& model) {
  NamedTensors<float> parameters = initial_parameters<float>(model, Initialization::gpt2, 1);
  const auto multiply = [&](const char* name, float factor) {
    for (float& value : tensor(parameters, name)) value *= factor;
  };
  for (const char* name : {"wte.weight", "wpe.weight", "h.0.attn.c_proj.weight", "h.0.mlp.c_proj.weight"}) multiply(name, 2e5F);
  multiply("lm_head.weight", 0.1F);
  return parameters;
}

TEST(MixedTraining, Fp16LearnsWhatItsUnscaledGradientsCannotTeach) {
  const auto final_loss = [](const char* precision, const char* loss_scale) {
    const TrainingRun run = run_with_tiny_gradients(precision, loss_scale);
    const TrainingRecord<float> record = train<float>(run, parameters_with_tiny_gradients(run.model));
    EXPECT_EQ(record.updates.back(), run.steps) << "nothing overflows";
    return record.losses.back();
  };
  const double expected = final_loss("fp32", "none");
  EXPECT_LT(expected, 0.4);
  EXPECT_NEAR(final_loss("bf16", "none"), expected, 0.05 * expected);
  EXPECT_NEAR(final_loss("fp16", "auto"), expected, 0.05 * expected);
  EXPECT_GT(final_loss("fp16", "none"), 2.6) << "log(16) is 2.77";
}

TEST(MixedTraining, TheGradientsThatCannotTeachUnderflow) {
  const TrainingRun run = run_with_tiny_gradients("fp32", "none");
  const NamedTensors<float> parameters = parameters_with_tiny_gradients(run.model);
  const Batch batch = run.batch(0);
  NamedTensors<float> traced, gradients = zero_tensors<float>(run.model);
  Pass<float> pass{.valid_tokens = batch.valid_tokens()};
  pass.trace = [&](std::string_view name, std::span<const float> values) {
    if (name.starts_with("d.h.")) traced[std::string(name)].assign(values.begin(), values.end());
  };
  static_cast<void>(loss_and_gradients(run.model, parameters, batch, pass, gradients));

  ASSERT_EQ(traced.size(), 10U);
  const NamedTensors<float> stream{{"d.h.0", traced.at("d.h.0")}};
  EXPECT_GT(underflow_share(stream, DType::f16).zero, 0.99);
  EXPECT_LT(underflow_share(stream, DType::f16, 65536.0).zero, 0.01);
  EXPECT_EQ(underflow_share(stream, DType::bf16).zero, 0.0);
}

}  // namespace
}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
#include "suites/golden.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/config.h"
#include "suites/golden_bounds.h"
#include "suites/golden_movement.h"
#include "suites/golden_run.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

const fs::path kResults = fs::path(TANDEM_SOURCE_DIR) / "results" / "golden";
const fs::path kMore = fs::path(TANDEM_SOURCE_DIR) / ".." / "shared" / "golden";

TrainingPlan plan_of(const GoldenSet& set, const std::vector<std::string>& settings) {
  RunConfig config;
  config.model = set.model;
  config.plan.batch = golden_batch(set);
  for (const std::string& setting : settings) set_option(config, setting);
  return config.plan;
}

PitfallSet only(Pitfall pitfall) { return PitfallSet(std::vector<Pitfall>{pitfall}); }

bool engine_passes(const GoldenSet& set, const std::vector<std::string>& settings, const PitfallSet& pitfalls) {
  const TrainingPlan plan = plan_of(set, settings);
  const GoldenOutcome reference = run_golden_reference(set, plan);
  EXPECT_TRUE(reference.passed()) << reference.worst().name << " " << reference.worst().tensor;
  return run_golden_engine(set, plan, {.pitfalls = pitfalls}, reference).passed();
}

const Property& find(const std::vector<Property>& properties, const std::string& name) {
  return *std::find_if(properties.begin(), properties.end(), [&](const Property& p) { return p.name == name; });
}

TEST(Golden, ReferenceAndEngineAgreeWithTheSetInEveryPrecision) {
  const GoldenSet set = read_golden_set(kResults / "tiny");
  for (const std::string_view precision : precisions()) {
    EXPECT_TRUE(engine_passes(set, {fmt::format("precision={}", precision), "data=2"}, {})) << precision;
  }
}

TEST(Golden, FindsMistakesInSixteenBits) {
  const GoldenSet set = read_golden_set(kResults / "tiny");
  const TrainingPlan plan = plan_of(set, {"precision=bf16", "data=3", "zero=2"});
  const GoldenOutcome reference = run_golden_reference(set, plan);
  EXPECT_TRUE(run_golden_engine(set, plan, {}, reference).passed());
  for (const Pitfall pitfall : {Pitfall::clipping_dropped, Pitfall::decay_on_every_tensor, Pitfall::adam_epsilon_inside_root,
                                Pitfall::mean_of_rank_means, Pitfall::update_in_storage_precision}) {
    EXPECT_FALSE(run_golden_engine(set, plan, {.pitfalls = only(pitfall)}, reference).passed()) << name(pitfall);
  }
}

TEST(Golden, FindsOneGradientThatIsATenthTooLarge) {
  const GoldenSet set = read_golden_set(kResults / "tiny");
  const TrainingPlan plan = plan_of(set, {"precision=bf16"});
  GoldenRun run = golden_reference_run(set, plan);
  for (const bool is_wrong : {false, true}) {
    if (is_wrong) {
      for (double& value : run.gradients_step0.at("h.1.mlp.c_fc.weight")) value *= 1.1;
    }
    std::vector<Property> deviations = golden_deviations(set, run);
    limit_narrow_reference(set, plan, deviations);
    const bool all_hold = std::all_of(deviations.begin(), deviations.end(), [](const Property& p) { return p.holds(); });
    EXPECT_EQ(all_hold, !is_wrong);
  }
}

// The reference alone would let an engine through that shares its mistake; the limits a priori do not.
TEST(Golden, AReferenceThatIsWrongDoesNotWidenTheLimits) {
  const GoldenSet set = read_golden_set(kResults / "tiny");
  const TrainingPlan plan = plan_of(set, {"precision=bf16"});
  GoldenOutcome reference = run_golden_reference(set, plan);
  const GoldenOutcome honest = run_golden_engine(set, plan, {}, reference);
  for (Property& property : reference.properties) property.value = 1.0;
  const GoldenOutcome widened = run_golden_engine(set, plan, {}, reference);
  const GoldenOutcome prior = run_golden_reference(set, plan);
  for (std::size_t i = 0; i < prior.properties.size(); ++i) {
    EXPECT_LE(widened.properties[i].limit, prior.properties[i].limit) << prior.properties[i].name;
    EXPECT_LE(honest.properties[i].limit, widened.properties[i].limit) << prior.properties[i].name;
  }
}

TEST(Golden, FindsMeansOfUnevenMicroBatchesInSixteenBits) {
  if (!fs::exists(kMore / "varlen")) GTEST_SKIP() << "the golden set varlen is not here";
  const GoldenSet set = read_golden_set(kMore / "varlen");
  EXPECT_FALSE(engine_passes(set, {"precision=bf16"}, only(Pitfall::mean_of_micro_batch_means)));
}

TEST(Golden, RunThatSkipsAStepFailsAndSaysWhatToDo) {
  const GoldenSet set = read_golden_set(kResults / "tiny");
  const TrainingPlan plan = plan_of(set, {"precision=fp16", "loss_scale_initial=16777216"});
  const GoldenOutcome reference = run_golden_reference(set, plan);
  const Property& skipped = find(reference.properties, "skipped_steps");
  EXPECT_GT(skipped.value, 0);
  EXPECT_FALSE(skipped.holds());
  EXPECT_NE(skipped.derivation.find("loss_scale_initial"), std::string::npos);
  EXPECT_FALSE(run_golden_engine(set, plan, {}, reference).passed());
}

TEST(Golden, RoundingErrorsFollowFromTheNumberOfRoundings) {
  GptConfig model;
  model.layers = 2;
  TrainingPlan plan;
  plan.numerics = numerics_from_precision("bf16");
  const double c = 1 / std::sqrt(8 * std::log(2.0));
  EXPECT_NEAR(expected_rounding_errors(model, plan).loss, c * 0x1p-8 * std::sqrt(39.0), 1e-15);
  EXPECT_NEAR(expected_rounding_errors(model, plan).gradients, c * 0x1p-8 * std::sqrt(78.0), 1e-15);
  plan.numerics = numerics_from_precision("fp16-autocast");
  EXPECT_NEAR(expected_rounding_errors(model, plan).loss, c * 0x1p-11 * std::sqrt(18.0), 1e-15);
}

// c^2 u^2 is the mean square error of rounding numbers that are spread evenly over their logarithms.
TEST(Golden, MeanErrorOfRoundingIsWhatTheBoundsTake) {
  double squares = 0;
  constexpr int kNumbers = 100000;
  for (int i = 0; i < kNumbers; ++i) {
    const double x = std::exp2((i + 0.5) / kNumbers);
    const double error = (static_cast<double>(round_to(static_cast<float>(x), DType::bf16)) - x) / x;
    squares += error * error;
  }
  EXPECT_NEAR(std::sqrt(squares / kNumbers) / 0x1p-8, 1 / std::sqrt(8 * std::log(2.0)), 2e-3);
}

TEST(Golden, MovementGrowsWithTheErrorAndIsNothingWithoutOne) {
  const GoldenSet set = read_golden_set(kResults / "tiny");
  GradientErrors none, small, large;
  for (const ParameterSpec& spec : gpt_parameters(set.model)) {
    none[spec.name] = 0;
    small[spec.name] = 1e-3;
    large[spec.name] = 1e-2;
  }
  const GoldenMovement still = golden_movement(set, none, 0.4);
  const GoldenMovement a = golden_movement(set, small, 0.4);
  const GoldenMovement b = golden_movement(set, large, 0.4);
  for (const auto& [name, moved] : a.parameters_last) {
    EXPECT_EQ(still.parameters_last.at(name), 0) << name;
    EXPECT_GT(moved, 0) << name;
    EXPECT_GT(b.parameters_last.at(name), moved) << name;
    EXPECT_LE(b.parameters_last.at(name), 1.0 + b.summary_last.at(name)) << name;
  }
  EXPECT_EQ(a.loss.front(), 0);
  EXPECT_GT(b.loss.back(), a.loss.back());
  EXPECT_EQ(still.growth.back(), 1.0);
}

}  // namespace
}  // namespace tandem

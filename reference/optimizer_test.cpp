// SPDX-License-Identifier: Apache-2.0
#include "reference/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/dtype.h"
#include "core/io/safetensors.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

SafetensorsFile piece(const std::string& name) {
  return SafetensorsFile(own_golden_folder() / "pieces" / (name + ".safetensors"));
}

double metadata_number(const SafetensorsFile& file, std::string_view key) { return std::stod(file.metadata().find(key)->second); }

template <class Real>
class AdamWPiece : public testing::Test {};
using Precisions = testing::Types<double, float>;
TYPED_TEST_SUITE(AdamWPiece, Precisions);

TYPED_TEST(AdamWPiece, MatchesAfterEveryStep) {
  const SafetensorsFile file = piece("adamw");
  OptimizerConfig config;
  config.beta1 = metadata_number(file, "beta1");
  config.beta2 = metadata_number(file, "beta2");
  config.epsilon = metadata_number(file, "eps");
  config.weight_decay = metadata_number(file, "weight_decay");
  const auto steps = file.entry("grad").shape[0];
  const auto count = file.entry("grad").shape[1];
  const auto gradients = file.read_as<TypeParam>("grad");
  std::vector<TypeParam> parameter = file.read_as<TypeParam>("param0");
  std::vector<TypeParam> m(parameter.size()), v(parameter.size());

  for (std::int64_t step = 0; step < steps; ++step) {
    const auto gradient = std::span(gradients).subspan(static_cast<std::size_t>(step * count), static_cast<std::size_t>(count));
    adamw_update<TypeParam>(config, {step + 1, metadata_number(file, "lr"), true}, parameter, gradient, m, v);

    // About six roundings a step and element, each of the size of the result.
    const double bound = 6.0 * static_cast<double>(step + 1) * unit_roundoff(dtype_of<TypeParam>);
    const auto expected = [&](std::string_view name) {
      const std::vector<double> all = file.read_as<double>(name);
      return std::vector<double>(all.begin() + step * count, all.begin() + (step + 1) * count);
    };
    EXPECT_LE(relative_l2(parameter, expected("param")), bound) << "step " << step;
    EXPECT_LE(relative_l2(m, expected("m")), bound) << "step " << step;
    EXPECT_LE(relative_l2(v, expected("v")), bound) << "step " << step;
  }
}

TEST(Clipping, MatchesRecordedCases) {
  const SafetensorsFile file = piece("clip_grad_norm");
  int clipped = 0;
  for (int i = 0; i < 4; ++i) {
    const std::string prefix = std::to_string(i) + "/";
    NamedTensors<double> gradients;
    for (int j = 0; j < 3; ++j) gradients[std::to_string(j)] = file.read_as<double>(prefix + "grad." + std::to_string(j));

    const double norm = global_norm(gradients);
    const double coefficient = clip_coefficient(norm, file.read_as<double>(prefix + "max_norm")[0]);
    scale(gradients, coefficient);

    const double expected_norm = file.read_as<double>(prefix + "norm")[0];
    EXPECT_LE(std::abs(norm - expected_norm), 1e-14 * expected_norm) << "case " << i;
    for (int j = 0; j < 3; ++j) {
      const std::string name = std::to_string(j);
      EXPECT_LE(relative_l2(gradients[name], file.read_as<double>(prefix + "clipped." + name)), 1e-14) << "case " << i;
    }
    clipped += coefficient < 1.0 ? 1 : 0;
  }
  EXPECT_GT(clipped, 0);
  EXPECT_LT(clipped, 4);
}

TEST(Clipping, IsSwitchedOffByZero) { EXPECT_EQ(clip_coefficient(1e9, 0.0), 1.0); }

TEST(Clipping, KeepsNanVisible) { EXPECT_TRUE(std::isnan(clip_coefficient(std::numeric_limits<double>::quiet_NaN(), 1.0))); }

TEST(Sgd, DecaysThenStepsAgainstTheGradient) {
  OptimizerConfig config;
  config.kind = OptimizerKind::sgd;
  config.weight_decay = 0.5;
  std::vector<double> decayed = {2.0, -4.0}, plain = decayed;
  const std::vector<double> gradient = {1.0, 3.0};

  sgd_update<double>(config, {1, 0.25, true}, decayed, gradient);
  sgd_update<double>(config, {1, 0.25, false}, plain, gradient);

  EXPECT_EQ(decayed, (std::vector<double>{2.0 * 0.875 - 0.25, -4.0 * 0.875 - 0.75}));
  EXPECT_EQ(plain, (std::vector<double>{2.0 - 0.25, -4.0 - 0.75}));
}

TEST(OptimizerStep, DecaysMatricesAndEmbeddingsOnly) {
  const GptConfig model{.vocabulary = 5, .sequence = 4, .layers = 1, .hidden = 4, .heads = 2, .mlp_hidden = 0};
  OptimizerConfig config;
  config.weight_decay = 0.5;
  for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::sgd}) {
    config.kind = kind;
    const NamedTensors<double> before = lively_parameters(model, 1);
    NamedTensors<double> after = before;
    OptimizerState<double> state = initial_optimizer_state<double>(model);

    optimizer_step(model, config, 0.1, zero_tensors<double>(model), after, state);

    EXPECT_EQ(state.updates, 1);
    for (const ParameterSpec& parameter : gpt_parameters(model)) {
      const double factor = parameter.shape.size() >= 2 ? 0.95 : 1.0;
      for (std::size_t i = 0; i < before.at(parameter.name).size(); ++i) {
        EXPECT_DOUBLE_EQ(after.at(parameter.name)[i], factor * before.at(parameter.name)[i]) << parameter.name;
      }
    }
  }
}

TEST(LearningRate, WarmsUpLinearlyThenStaysConstant) {
  OptimizerConfig optimizer;
  optimizer.learning_rate = 0.8;
  const ScheduleConfig schedule{ScheduleKind::constant, 4, 0, 0.1};
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 0, 100), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 3, 100), 0.8);
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 4, 100), 0.8);
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 99, 100), 0.8);
}

TEST(LearningRate, FallsAlongACosineToItsFloor) {
  OptimizerConfig optimizer;
  optimizer.learning_rate = 1.0;
  const ScheduleConfig schedule{ScheduleKind::cosine, 2, 10, 0.2};
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 1, 50), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 2, 50), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 6, 50), 0.6);
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 10, 50), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 49, 50), 0.2);
}

TEST(LearningRate, DecaysOverTheWholeRunWhereNoEndIsGiven) {
  OptimizerConfig optimizer;
  optimizer.learning_rate = 1.0;
  const ScheduleConfig schedule{ScheduleKind::cosine, 0, 0, 0.0};
  EXPECT_DOUBLE_EQ(learning_rate(optimizer, schedule, 20, 40), 0.5);
}

}  // namespace
}  // namespace tandem::reference

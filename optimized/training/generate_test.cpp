// SPDX-License-Identifier: Apache-2.0
#include "optimized/training/generate.h"

#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "reference/generation.h"

namespace tandem {
namespace {

GptConfig small_model(bool tied) {
  GptConfig model;
  model.vocabulary = 23;
  model.sequence = 9;
  model.layers = 2;
  model.hidden = 12;
  model.heads = 3;
  model.tied = tied;
  return model;
}

std::vector<std::int32_t> generate_with_engine(const GptConfig& model, const std::vector<std::int32_t>& prompt,
                                               const GenerateOptions& options) {
  std::vector<std::int32_t> tokens;
  run_world({.ranks = 1}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    TrainingPlan plan;
    plan.precision = "fp64";
    plan.numerics = numerics_from_precision("fp64");
    const RankContext context{&comm, kernels.get(), &arena, nullptr, {}};
    Engine engine(context, {model, plan, {}, {}, 1, 1});
    engine.store().initialise(model, Initialization::scattered, 4);
    tokens = generate(context, model, engine.store(), prompt, options);
  });
  return tokens;
}

class Generate : public testing::TestWithParam<std::tuple<bool, double>> {};

TEST_P(Generate, WithACacheGivesTheTokensOfWholeForwardPasses) {
  const auto [tied, temperature] = GetParam();
  const GptConfig model = small_model(tied);
  const auto parameters = reference::initial_parameters<double>(model, Initialization::scattered, 4);
  // Shorter than the context, as long, and longer; 12 more tokens pass its end in each case.
  for (const std::vector<std::int32_t>& prompt :
       {std::vector<std::int32_t>{5}, {1, 2, 3, 4, 5, 6, 7, 8, 9}, {9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2}}) {
    const auto expected =
        reference::generate<double>(model, parameters, prompt, {.tokens = 12, .temperature = temperature, .seed = 6});

    EXPECT_EQ(generate_with_engine(model, prompt, {.tokens = 12, .temperature = temperature, .seed = 6}), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(HeadsAndTemperatures, Generate, testing::Combine(testing::Bool(), testing::Values(0.0, 1.0)));

TEST(Generate, RefusesAnEmptyPrompt) {
  EXPECT_NE(message_of<InputError>([] { (void)generate_with_engine(small_model(true), {}, {}); }).find("prompt is empty"),
            std::string::npos);
}

TEST(Generate, RefusesATokenBeyondTheVocabulary) {
  EXPECT_NE(message_of<InputError>([] {
              (void)generate_with_engine(small_model(true), {3, 23}, {});
            }).find("token 23"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem

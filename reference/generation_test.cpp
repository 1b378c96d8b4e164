// SPDX-License-Identifier: Apache-2.0
#include "reference/generation.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "reference/gpt.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

GptConfig small_model() { return {.vocabulary = 9, .sequence = 6, .layers = 1, .hidden = 8, .heads = 2, .mlp_hidden = 0}; }

TEST(SampleToken, AtTemperatureZeroIsTheFirstOfTheLikeliest) {
  CounterRng rng(1, "generate");
  EXPECT_EQ(sample_token<double>(std::vector<double>{0.5, 2.0, 2.0, -1.0}, 0.0, rng), 1);
  EXPECT_EQ(rng.position(), 0U) << "nothing may be drawn";
}

TEST(SampleToken, DrawsByTheTemperedSoftmax) {
  const std::vector<double> logits = {0.0, 1.0, -2.0};
  CounterRng rng(3, "generate");
  std::vector<double> shares(3);
  const int draws = 40000;

  for (int i = 0; i < draws; ++i) shares[static_cast<std::size_t>(sample_token<double>(logits, 0.5, rng))] += 1.0 / draws;

  const double sum = std::exp(0.0) + std::exp(2.0) + std::exp(-4.0);
  // Five standard deviations: 5 sqrt(p (1 - p) / draws) <= 0.0125.
  EXPECT_NEAR(shares[0], 1.0 / sum, 0.0125);
  EXPECT_NEAR(shares[1], std::exp(2.0) / sum, 0.0125);
  EXPECT_GT(shares[2], 0.0);
  EXPECT_NEAR(shares[2], std::exp(-4.0) / sum, 0.005);
}

TEST(SampleToken, NeverDrawsAnImpossibleToken) {
  CounterRng rng(3, "generate");
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(sample_token<float>(std::vector<float>{-1e4F, 3.0F, -1e4F}, 0.1, rng), 1);
}

TEST(Generate, AppendsTheLikeliestTokenOfTheLastWindow) {
  const GptConfig model = small_model();
  const NamedTensors<double> parameters = lively_parameters(model, 2);
  std::vector<std::int32_t> context = {3, 1, 4};

  const std::vector<std::int32_t> tokens = generate<double>(model, parameters, context, {.tokens = 8});

  ASSERT_EQ(tokens.size(), 8U);
  for (const std::int32_t token : tokens) {
    const auto window = std::min<std::ptrdiff_t>(std::ssize(context), model.sequence);
    Batch batch = make_batch(1, window);
    std::copy(context.end() - window, context.end(), batch.ids.begin());
    const std::vector<double> all = logits(model, parameters, batch);
    EXPECT_EQ(token, std::max_element(all.end() - model.vocabulary, all.end()) - (all.end() - model.vocabulary));
    context.push_back(token);
  }
}

TEST(Generate, IsAFunctionOfItsSeed) {
  const GptConfig model = small_model();
  const NamedTensors<double> parameters = lively_parameters(model, 2);
  const std::vector<std::int32_t> prompt = {5};
  const auto with_seed = [&](std::uint64_t seed) {
    return generate<double>(model, parameters, prompt, {.tokens = 20, .temperature = 1.0, .seed = seed});
  };
  EXPECT_EQ(with_seed(1), with_seed(1));
  EXPECT_NE(with_seed(1), with_seed(2));
}

TEST(Generate, RefusesAnEmptyPromptAndForeignTokens) {
  const GptConfig model = small_model();
  const NamedTensors<double> parameters = lively_parameters(model, 2);
  EXPECT_THROW(static_cast<void>(generate<double>(model, parameters, {}, {})), InputError);
  // The foreign token lies before the window, where no forward pass would see it.
  const std::vector<std::int32_t> prompt = {9, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_THROW(static_cast<void>(generate<double>(model, parameters, prompt, {})), InputError);
}

}  // namespace
}  // namespace tandem::reference

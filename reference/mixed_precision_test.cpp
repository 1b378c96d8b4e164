// SPDX-License-Identifier: Apache-2.0
#include "reference/mixed_precision.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "core/error.h"
#include "reference/attention.h"
#include "reference/experts.h"
#include "reference/gpt.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

using Values = std::vector<double>;

GptConfig small_model(int experts) {
  GptConfig model{.vocabulary = 13, .sequence = 8, .layers = 2, .hidden = 8, .heads = 2, .mlp_hidden = 12};
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.2;
  model.experts = experts;
  if (experts > 0) {
    model.expert_choices = 2;
    model.auxiliary_loss_weight = 0.1;
  }
  return model;
}

/// A model with its parameters at rest, one batch, and what a pass over it leaves.
class MixedPrecisionPass : public ::testing::TestWithParam<int> {
 protected:
  template <class Real>
  NamedTensors<Real> gradients(const Pass<Real>& settings) {
    Pass<Real> pass = settings;
    pass.valid_tokens = batch_.valid_tokens();
    pass.dropout = DropoutStep{3, 1};
    NamedTensors<Real> result = zero_tensors<Real>(model_);
    NamedTensors<Real> parameters = converted<Real>(parameters_);
    round_all(pass.rounding.storage, parameters);
    loss_ = loss_and_gradients(model_, parameters, batch_, pass, result);
    return result;
  }

  GptConfig model_ = small_model(GetParam());
  NamedTensors<double> parameters_ = lively_parameters(model_, 5);
  Batch batch_ = ragged_batch(model_, 8, {8, 3, 6}, 7);
  double loss_ = 0.0;
};

std::string dense_or_experts(const ::testing::TestParamInfo<int>& parameter) {
  return parameter.param == 0 ? "dense" : "experts";
}
INSTANTIATE_TEST_SUITE_P(Models, MixedPrecisionPass, ::testing::Values(0, 4), dense_or_experts);

TEST(Rounding, IsThatOfCore) {
  CounterRng rng(1, "bits");
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(rng.next_below(std::uint64_t{1} << 32)));
    if (std::isnan(value)) continue;
    for (const DType dtype : {DType::f16, DType::bf16}) {
      ASSERT_EQ(rounded(static_cast<double>(value), dtype), static_cast<double>(round_to(value, dtype))) << value;
      ASSERT_EQ(rounded(value, dtype), round_to(value, dtype)) << value;
    }
  }
  EXPECT_TRUE(std::isnan(rounded(std::nan(""), DType::bf16)));
}

TEST(Rounding, RoundsDoublesOnce) {
  // Rounded to a float first, the last term is lost, and the tie that remains goes down to 1.
  EXPECT_EQ(rounded(1.0 + 0x1p-8 + 0x1p-40, DType::bf16), 1.0 + 0x1p-7);
  EXPECT_EQ(rounded(1.0 + 0x1p-11 + 0x1p-40, DType::f16), 1.0 + 0x1p-10);
}

TEST(Rounding, OverflowsToInfinityAndUnderflowsGradually) {
  EXPECT_EQ(rounded(65519.0, DType::f16), 65504.0);
  EXPECT_EQ(rounded(-65520.0, DType::f16), -INFINITY);
  EXPECT_EQ(rounded(3.4e38, DType::bf16), INFINITY);
  EXPECT_EQ(rounded(0x1p-24, DType::f16), 0x1p-24);
  EXPECT_EQ(rounded(0x1.8p-24, DType::f16), 0x1p-23);
  EXPECT_EQ(rounded(0x1p-25, DType::f16), 0.0);
  EXPECT_EQ(rounded(1.2345678, DType::f32), 1.2345678) << "fp32 stands for Real";
}

TEST_P(MixedPrecisionPass, KeepsEveryTensorAtRestInItsStorage) {
  for (const DType storage : {DType::bf16, DType::f16, DType::f32}) {
    Pass<double> pass{.rounding = {.storage = storage}, .loss_scale = 1024.0};
    std::set<std::string> rounded_ones, others;
    pass.trace = [&](std::string_view name, std::span<const double> values) {
      const DType checked = storage == DType::f32 ? DType::bf16 : storage;
      const bool fits = std::all_of(values.begin(), values.end(), [&](double v) { return rounded(v, checked) == v; });
      (fits ? rounded_ones : others).emplace(name);
    };
    const NamedTensors<double> result = gradients(pass);

    // 2 layers of 10 (9 with experts) tensors beside embedding, ln_f and logits; the gradient of each.
    const std::size_t num_traced = GetParam() == 0 ? 46 : 42;
    EXPECT_EQ(rounded_ones.size() + others.size(), num_traced);
    if (storage == DType::f32) {
      EXPECT_TRUE(rounded_ones.empty()) << *rounded_ones.begin() << " would pass unrounded";
      continue;
    }
    // Logits of a router are statistics.
    const std::set<std::string> full =
        GetParam() == 0 ? std::set<std::string>{} : std::set<std::string>{"h.0.mlp.router", "h.1.mlp.router"};
    EXPECT_EQ(others, full) << name(storage);
    EXPECT_TRUE(all_finite(result));
  }
}

TEST_P(MixedPrecisionPass, ContainsThePowerOfTwoThatTheLossIsScaledBy) {
  const NamedTensors<float> expected = gradients(Pass<float>{});
  const double unscaled_loss = loss_;
  for (const double scale : {0x1p8, 0x1p16}) {
    NamedTensors<float> got = gradients(Pass<float>{.loss_scale = scale});
    EXPECT_EQ(loss_, unscaled_loss);
    EXPECT_NE(got, expected);
    unscale(got, scale);
    EXPECT_EQ(got, expected) << scale;
  }
}

// The roundings between the parameters and a gradient, some thirty in two layers forward and as many backward, are independent
// and of 0.4 units each in the mean: sqrt(60) * 0.4 = 3 units of the whole gradient. Twice to three times that where parts
// cancel.
TEST_P(MixedPrecisionPass, StaysWithinSomeRoundingsOfTheTruth) {
  Values expected;
  const NamedTensors<double> truth = gradients(Pass<double>{});
  for (const auto& [name, values] : truth) expected.insert(expected.end(), values.begin(), values.end());
  for (const DType storage : {DType::bf16, DType::f16}) {
    const double unit = unit_roundoff(storage);
    NamedTensors<float> got = gradients(Pass<float>{.rounding = {.storage = storage}, .loss_scale = 1024.0});
    unscale(got, 1024.0);
    std::vector<float> whole;
    for (const auto& [name, values] : got) {
      whole.insert(whole.end(), values.begin(), values.end());
      EXPECT_GT(relative_l2(values, truth.at(name)), unit / 16) << name << " was not computed in " << tandem::name(storage);
    }
    EXPECT_LT(relative_l2(whole, expected), 8 * unit);
    EXPECT_GT(relative_l2(whole, expected), unit);
  }
}

TEST_P(MixedPrecisionPass, AutocastRoundsOperandsAndNotResults) {
  const Rounding autocast = rounding_of(numerics_from_precision("bf16-autocast"));
  NamedTensors<double> traced;
  Pass<double> pass{.rounding = autocast};
  pass.trace = [&](std::string_view name, std::span<const double> values) {
    traced[std::string(name)].assign(values.begin(), values.end());
  };
  const NamedTensors<double> got = gradients(pass);

  const auto read = [](const Values& values) { return rounded_copy<double>(DType::bf16, values); };
  const std::int64_t tokens = 24;
  Values logits(24 * 13), dfinal(24 * 8);
  const Values final = read(traced.at("ln_f")), table = read(parameters_.at("wte.weight"));
  head_forward<double>({tokens, 8, 13}, final, table, logits);
  EXPECT_EQ(traced.at("logits"), logits);
  EXPECT_NE(traced.at("logits"), read(logits)) << "results are not rounded";
  Values unused(13 * 8);
  head_backward<double>({tokens, 8, 13}, final, table, read(traced.at("d.logits")), dfinal, unused);
  EXPECT_EQ(traced.at("d.ln_f"), dfinal);

  Values qkv(24 * 24), dnorm(24 * 8), dweight(8 * 24), dbias(24);
  const Values norm = read(traced.at("h.1.ln_1")), weight = read(parameters_.at("h.1.attn.c_attn.weight"));
  const Values dqkv = traced.at("d.h.1.attn.c_attn");
  linear_forward<double>({tokens, 8, 24}, norm, weight, parameters_.at("h.1.attn.c_attn.bias"), qkv);
  EXPECT_EQ(traced.at("h.1.attn.c_attn"), qkv);
  linear_backward<double>({tokens, 8, 24}, norm, weight, read(dqkv), dnorm, dweight, {});
  bias_backward<double>(dqkv, dbias);
  EXPECT_EQ(traced.at("d.h.1.ln_1"), dnorm);
  EXPECT_EQ(got.at("h.1.attn.c_attn.weight"), dweight);
  EXPECT_EQ(got.at("h.1.attn.c_attn.bias"), dbias) << "no product: dy as it is";
}

TEST_P(MixedPrecisionPass, RoundsEmbeddingsBeforeAndAfterDropout) {
  NamedTensors<double> traced;
  Pass<double> pass{.rounding = {.storage = DType::bf16}};
  pass.trace = [&](std::string_view name, std::span<const double> values) {
    traced[std::string(name)].assign(values.begin(), values.end());
  };
  const NamedTensors<double> got = gradients(pass);

  const auto stored = [](const Values& values) { return rounded_copy<double>(DType::bf16, values); };
  const Dropout dropout{0.2, {3, 1, 0, DropoutSite::embedding}};
  const RowPlacement rows{batch_.row_ids, 8, 8};
  Values sum(24 * 8), dsum(24 * 8), dtokens(13 * 8), dpositions(8 * 8);
  embedding_forward<double>(stored(parameters_.at("wte.weight")), stored(parameters_.at("wpe.weight")), batch_.ids,
                            batch_.positions, sum);
  sum = stored(sum);
  apply_dropout<double>(dropout, rows, sum, sum);
  EXPECT_EQ(traced.at("embedding"), stored(sum));
  apply_dropout<double>(dropout, rows, traced.at("d.embedding"), dsum);
  embedding_backward<double>(stored(dsum), batch_.ids, batch_.positions, dtokens, dpositions);
  EXPECT_EQ(got.at("wpe.weight"), dpositions);
}

TEST(RoundedExperts, StoreEveryTensorOfAnExpert) {
  const GptConfig model = small_model(4);
  const NamedTensors<double> parameters = lively_parameters(model, 5);
  ExpertLayer layer = expert_layer(model, 8, 1);
  layer.rounding.storage = DType::bf16;
  const auto at_rest = [](const Values& values) { return rounded_copy<double>(DType::bf16, values) == values; };
  const Values x = random_values(8 * 8, 1), dout = random_values(8 * 8, 2);

  ExpertActivations<double> kept;
  NamedTensors<double> gradients = zero_tensors<double>(model);
  static_cast<void>(experts_forward<double>(layer, parameters, "h.0.mlp", x, kept));
  const ExpertsGradients<double> result = experts_backward<double>(layer, parameters, "h.0.mlp", x, kept, dout, gradients);
  EXPECT_FALSE(at_rest(kept.routing.logits));
  EXPECT_FALSE(at_rest(kept.routing.gates));
  EXPECT_TRUE(at_rest(result.dlogits));
  OfExperts<double> y;
  for (const MlpActivations<double>& expert : kept.experts) {
    EXPECT_TRUE(at_rest(expert.before_gelu) && at_rest(expert.after_gelu) && at_rest(expert.y));
    y.push_back(expert.y);
  }
  const CombineGradients<double> combined = combine_backward<double>(layer, kept.routing, y, dout);
  EXPECT_FALSE(at_rest(combined.dgates));
  for (std::size_t e = 0; e < y.size(); ++e) {
    EXPECT_TRUE(at_rest(combined.dy[e]));
    EXPECT_TRUE(at_rest(expert_backward<double>(layer, parameters, expert_name("h.0.mlp", static_cast<int>(e)), kept.experts[e],
                                                combined.dy[e], gradients)));
  }
}

TEST(RoundedExperts, StoreTheGradientInsideAnExpert) {
  const GptConfig model = small_model(4);
  const NamedTensors<double> parameters = lively_parameters(model, 5);
  ExpertLayer layer = expert_layer(model, 8, 1);
  layer.rounding.storage = DType::bf16;
  NamedTensors<double> gradients = zero_tensors<double>(model);

  const auto kept = expert_forward<double>(layer, parameters, "h.0.mlp.experts.1", random_values(8, 1));
  static_cast<void>(expert_backward<double>(layer, parameters, "h.0.mlp.experts.1", kept, random_values(8, 2), gradients));

  // With a single row the gradient of the bias is the gradient before GELU.
  const Values& dbias = gradients.at("h.0.mlp.experts.1.c_fc.bias");
  EXPECT_EQ(dbias, rounded_copy<double>(DType::bf16, dbias));
  EXPECT_NE(dbias, Values(12));
}

TEST(MaterializedAttention, UsesProbabilitiesAsTheyAreKept) {
  const std::vector<std::int64_t> row_ids = {0};
  const std::vector<std::int32_t> document_starts(5, 0);
  const AttentionInput input{.heads = 1,
                             .hidden = 4,
                             .rows = {row_ids, 5, 5},
                             .document_starts = document_starts,
                             .dropout = {},
                             .probabilities = DType::bf16};
  const Values qkv = random_values(5 * 12, 7);
  Values out(20), probabilities(25), expected(20);
  attention_forward<double>(input, qkv, out, probabilities);

  EXPECT_EQ(probabilities, rounded_copy<double>(DType::bf16, probabilities));
  for (std::size_t t = 0; t < 5; ++t) {
    for (std::size_t s = 0; s <= t; ++s) {
      for (std::size_t c = 0; c < 4; ++c) expected[t * 4 + c] += probabilities[t * 5 + s] * qkv[s * 12 + 8 + c];
    }
  }
  EXPECT_LT(relative_l2(out, expected), 1e-15);
}

TEST(StoredGradients, AreRoundedAfterEachAddition) {
  NamedTensors<double> wide{{"a", {0.0, 0.0}}}, stored = wide;
  const NamedTensors<double> big{{"a", {1.0, 1.0}}}, small{{"a", {0x1p-9, 0x1p-7}}};
  for (const auto* part : {&big, &small, &small}) {
    accumulate_gradients(DType::f32, *part, wide);
    accumulate_gradients(DType::bf16, *part, stored);
  }

  EXPECT_EQ(wide.at("a"), (Values{1.0 + 0x1p-8, 1.0 + 0x1p-6}));
  EXPECT_EQ(stored.at("a"), (Values{1.0, 1.0 + 0x1p-6})) << "below half a unit of 1, every addition is lost";
}

TEST(Overflow, IsAnElementThatIsNotFinite) {
  NamedTensors<float> gradients{{"a", {1.0F, 2.0F}}, {"b", {3e38F}}};
  EXPECT_TRUE(all_finite(gradients));
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    gradients.at("a")[1] = bad;
    EXPECT_FALSE(all_finite(gradients));
  }
}

TEST(UnderflowShare, CountsNonzeroElementsByWhatRoundingLeavesOfThem) {
  // fp16: below 2^-25 zero, below 2^-14 subnormal, from 65520 infinite.
  const NamedTensors<double> tensors{{"a", {0.0, 0x1p-30, -0x1p-26, 0x1p-20}}, {"b", {1.0, 0.0, 1e6, -0x1p-14, 3e-5, 2.0}}};

  const UnderflowShare half = underflow_share(tensors, DType::f16);
  EXPECT_EQ(half.elements, 8);
  EXPECT_EQ(half.zero, 2.0 / 8);
  EXPECT_EQ(half.subnormal, 2.0 / 8);
  EXPECT_EQ(half.infinite, 1.0 / 8);

  const UnderflowShare scaled = underflow_share(tensors, DType::f16, 0x1p10);
  EXPECT_EQ(scaled.zero, 0.0);
  EXPECT_EQ(scaled.subnormal, 2.0 / 8) << "2^-20 and 2^-16";

  const UnderflowShare brain = underflow_share(tensors, DType::bf16);
  EXPECT_EQ(brain.zero + brain.subnormal + brain.infinite, 0.0);
  EXPECT_EQ(underflow_share(NamedTensors<double>{{"a", {0.0}}}, DType::f16).elements, 0);
  EXPECT_THROW(static_cast<void>(underflow_share(tensors, DType::f32)), ContractError);
}

}  // namespace
}  // namespace tandem::reference

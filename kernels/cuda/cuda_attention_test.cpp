// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <numeric>

#include "kernels/cuda/attention_test_support.h"

namespace tandem::device_test {
namespace {

using CudaAttention = DeviceTest;

// Every dtype through the plain kernels: one key, less than a tile, one more than a tile, several; odd head sizes; documents that
// start inside tiles; masks whose rows begin at no multiple of four; a part of the model's heads.
const Setting kPlain[] = {
    {.dtype = DType::f64, .rows = 0, .sequence = 4, .heads = 2, .head_size = 3},
    {.dtype = DType::f32, .rows = 1, .sequence = 1},
    {.dtype = DType::f32, .rows = 2, .sequence = 5, .heads = 3, .head_size = 7, .documents = true, .dropout = 0.3},
    {.dtype = DType::f64,
     .rows = 2,
     .sequence = 67,
     .heads = 2,
     .head_size = 24,
     .documents = true,
     .dropout = 0.2,
     .total_heads = 5,
     .first_head = 3},
    {.dtype = DType::f32, .rows = 1, .sequence = 65, .heads = 2, .head_size = 64},
    {.dtype = DType::f64, .rows = 1, .sequence = 20, .heads = 1, .head_size = 130}};

TEST_F(CudaAttention, MatchesTheDefinitionInSingleAndDouble) {
  for (const Setting& s : kPlain) {
    SCOPED_TRACE(s.text());
    const Inputs inputs(s);

    const Results got = run_attention(kernels(), inputs, s.dtype);

    const Results truth = reference_attention<double>(inputs);
    const Results same = s.dtype == DType::f32 ? reference_attention<float>(inputs) : Results{};
    expect_close("out", got.out, truth.out, s.dtype, same.out, s.chain());
    expect_close("dqkv", got.dqkv, truth.dqkv, s.dtype, same.dqkv, s.chain());
  }
}

// 16-bit tensors that the tensor cores cannot take: an odd head size, an odd place.
const Setting kPlainNarrow[] = {
    {.dtype = DType::bf16, .rows = 2, .sequence = 37, .heads = 3, .head_size = 7, .documents = true, .dropout = 0.3},
    {.dtype = DType::f16, .rows = 1, .sequence = 40, .heads = 1, .head_size = 64, .place = Place::odd}};

TEST_F(CudaAttention, RoundsOnceWhereTensorCoresAreNotUsed) {
  for (const Setting& s : kPlainNarrow) {
    SCOPED_TRACE(s.text());
    const Inputs inputs(s);

    const Results got = run_attention(kernels(), inputs, s.dtype);

    expect_close("out", got.out, reference_attention<double>(inputs).out, s.dtype, {}, s.chain());
    // From the out that was stored, rounded.
    expect_close("dqkv", got.dqkv, run_attention(kernels(), inputs, DType::f64, &got.out).dqkv, s.dtype, {}, s.chain());
  }
}

// The tensor cores: whole tiles and rests, more than one block of queries, each head size that has its own kernels and ones
// padded to them; documents that hide whole tiles; masks aligned to four and not.
const Setting kTensorCore[] = {
    {.dtype = DType::bf16, .rows = 1, .sequence = 1, .heads = 1, .head_size = 64},
    {.dtype = DType::bf16, .rows = 2, .sequence = 128, .heads = 1, .head_size = 64},
    {.dtype = DType::f16, .rows = 2, .sequence = 197, .heads = 2, .head_size = 64, .documents = true},
    {.dtype = DType::bf16, .rows = 2, .sequence = 77, .heads = 2, .head_size = 64, .documents = true, .dropout = 0.3},
    {.dtype = DType::f16, .rows = 1, .sequence = 140, .heads = 1, .head_size = 64, .dropout = 0.2, .side_beyond = 0},
    {.dtype = DType::f16, .rows = 1, .sequence = 70, .heads = 2, .head_size = 16, .total_heads = 5, .first_head = 2},
    {.dtype = DType::bf16, .rows = 1, .sequence = 133, .heads = 1, .head_size = 128, .documents = true},
    {.dtype = DType::bf16,
     .rows = 1,
     .sequence = 75,
     .heads = 2,
     .head_size = 80,
     .dropout = 0.3,
     .total_heads = 5,
     .first_head = 2},
    {.dtype = DType::f16,
     .rows = 1,
     .sequence = 76,
     .heads = 1,
     .head_size = 128,
     .documents = true,
     .dropout = 0.1,
     .side_beyond = 0}};

TEST_F(CudaAttention, OnTensorCoresIsOffByTheRoundingOfProbabilities) {
  for (const Setting& s : kTensorCore) {
    SCOPED_TRACE(s.text());
    const Inputs inputs(s);

    const Results got = run_attention(kernels(), inputs, s.dtype);

    const Results truth = reference_attention<double>(inputs);
    expect_within_roundings("out", got.out, truth.out, s.dtype, 0.75);
    expect_within_roundings("dqkv", got.dqkv, truth.dqkv, s.dtype, 1);
  }
}

TEST_F(CudaAttention, GivesTheSameBitsAgain) {
  for (const Setting& s : {kPlain[2], kTensorCore[3]}) {
    const Inputs inputs(s);
    const Results first = run_attention(kernels(), inputs, s.dtype), second = run_attention(kernels(), inputs, s.dtype);
    EXPECT_TRUE(first.out == second.out && first.dqkv == second.dqkv && first.statistics == second.statistics) << s.text();
  }
}

TEST_F(CudaAttention, LogsumexpIsThatOfTheScores) {
  for (const Setting& s : {kPlain[2], kTensorCore[3]}) {
    const Inputs inputs(s);
    const std::vector<double> got = run_attention(kernels(), inputs, s.dtype).statistics,
                              p = reference_attention<double>(inputs).statistics;
    for (std::int64_t i = 0; i < s.rows * s.heads * s.sequence; ++i) {
      // Of the key at a query's own position: p = e^(score - logsumexp).
      const std::int64_t t = i % s.sequence, head = i / s.sequence % s.heads, row = i / s.sequence / s.heads;
      const auto query = inputs.qkv.begin() + (row * s.sequence + t) * 3 * s.width() + head * s.head_size;
      const double score =
          std::inner_product(query, query + s.head_size, query + s.width(), 0.0) / std::sqrt(static_cast<double>(s.head_size));
      const double expected = score - std::log(p[static_cast<std::size_t>(i * s.sequence + t)]);
      ASSERT_NEAR(got[static_cast<std::size_t>(i)], expected, 1e-5 * (1 + std::fabs(expected))) << s.text() << ", " << i;
    }
  }
}

TEST_F(CudaAttention, LargeScoresDoNotOverflow) {
  for (const Setting& s :
       {Setting{.dtype = DType::f32, .rows = 1, .sequence = 70, .heads = 1, .head_size = 16}, kTensorCore[1]}) {
    Inputs inputs(s);
    for (double& value : inputs.qkv) value *= 32;
    const Results got = run_attention(kernels(), inputs, s.dtype), truth = reference_attention<double>(inputs);
    // Scores of size q.k / sqrt(d), up to 1e4 here, carry their rounding into the exponent: probabilities lose those digits.
    const double bound = 1e4 * static_cast<double>(std::numeric_limits<float>::epsilon()) * std::sqrt(16.0);
    EXPECT_LE(relative_error(got.out, truth.out), bound + unit_roundoff(s.dtype)) << s.text();
    EXPECT_LT(relative_error(got.dqkv, truth.dqkv), std::numeric_limits<double>::infinity()) << s.text();
  }
}

TEST_F(CudaAttention, NanInOneTokenStaysWithThoseThatSeeIt) {
  for (const Setting& s : {Setting{.dtype = DType::f32, .rows = 1, .sequence = 50, .heads = 1, .head_size = 8},
                           Setting{.dtype = DType::bf16, .rows = 1, .sequence = 50, .heads = 1, .head_size = 64}}) {
    Inputs inputs(s);
    for (std::int64_t t = 0; t < 50; ++t) inputs.starts[static_cast<std::size_t>(t)] = t < 40 ? 0 : 40;
    inputs.qkv[static_cast<std::size_t>(37 * 3 * s.width() + s.width())] = std::numeric_limits<double>::quiet_NaN();  // a key
    const std::vector<double> out = run_attention(kernels(), inputs, s.dtype).out;
    for (std::int64_t t = 0; t < 50; ++t) {
      ASSERT_EQ(std::isnan(out[static_cast<std::size_t>(t * s.width())]), t >= 37 && t < 40) << s.text() << ", token " << t;
    }
  }
}

TEST_F(CudaAttention, DecodingTokenByTokenGivesTheForwardPass) {
  struct Case {
    Setting setting;
    std::int64_t capacity;
  };
  for (const auto& [s, capacity] : {Case{{.dtype = DType::f64, .rows = 2, .sequence = 19, .heads = 3, .head_size = 10}, 23},
                                    Case{{.dtype = DType::bf16, .rows = 1, .sequence = 9, .heads = 2, .head_size = 64}, 9},
                                    Case{{.dtype = DType::f32, .rows = 1, .sequence = 3, .heads = 1, .head_size = 300}, 3}}) {
    SCOPED_TRACE(s.text());
    const Inputs inputs(s);
    const std::vector<double> whole = reference_attention<double>(inputs).out;
    const std::int64_t width = s.width();
    DeviceTensor keys(kernels(), s.dtype, {s.rows, capacity, width}), values(kernels(), s.dtype, {s.rows, capacity, width});
    for (std::int64_t t = 0; t < s.sequence; ++t) {
      std::vector<double> token, expected;
      for (std::int64_t row = 0; row < s.rows; ++row) {
        const std::int64_t at = row * s.sequence + t;
        token.insert(token.end(), inputs.qkv.begin() + at * 3 * width, inputs.qkv.begin() + (at + 1) * 3 * width);
        expected.insert(expected.end(), whole.begin() + at * width, whole.begin() + (at + 1) * width);
      }
      DeviceTensor in(kernels(), s.dtype, {s.rows, 3 * width}, token), out(kernels(), s.dtype, {s.rows, width});
      kernels().attention_decode(s.heads, s.head_size, t, in.view(), keys.view(), values.view(), out.view());
      expect_close("out", out.values(), expected, s.dtype, {}, s.chain());
    }
  }
}

TEST_F(CudaAttention, DecodesOverACacheOfSeveralStretches) {
  const Setting s = {.dtype = DType::f32, .rows = 1, .sequence = 530, .heads = 1, .head_size = 8};
  Inputs inputs(s);
  // The largest score is in the last stretch, so that what was summed before shrinks.
  for (std::int64_t c = 0; c < 8; ++c)
    inputs.qkv[static_cast<std::size_t>(520 * 24 + 8 + c)] = 4 * inputs.qkv[static_cast<std::size_t>(529 * 24 + c)];
  const auto thirds = [&](std::int64_t part) {
    std::vector<double> result;
    for (std::int64_t t = 0; t < s.sequence; ++t) {
      const auto from = inputs.qkv.begin() + (t * 3 + part) * 8;
      result.insert(result.end(), from, from + 8);
    }
    return result;
  };
  DeviceTensor keys(kernels(), s.dtype, {1, 530, 8}, thirds(1)), values(kernels(), s.dtype, {1, 530, 8}, thirds(2));
  DeviceTensor in(kernels(), s.dtype, {1, 24}, {inputs.qkv.end() - 24, inputs.qkv.end()}), out(kernels(), s.dtype, {1, 8});

  kernels().attention_decode(1, 8, 529, in.view(), keys.view(), values.view(), out.view());

  const std::vector<double> whole = reference_attention<double>(inputs).out;
  expect_close("out", out.values(), {whole.end() - 8, whole.end()}, s.dtype, {}, s.chain());
}

TEST_F(CudaAttention, RefusesWhatDoesNotFit) {
  Inputs inputs({.dtype = DType::bf16, .rows = 1, .sequence = 4, .heads = 1, .head_size = 2});
  DeviceTensor qkv(kernels(), DType::bf16, {4, 6}), out(kernels(), DType::bf16, {4, 2}),
      narrow(kernels(), DType::bf16, {1, 1, 4});
  DeviceTensor logsumexp(kernels(), DType::f32, {1, 1, 4}), cache(kernels(), DType::bf16, {1, 4, 2}),
      token(kernels(), DType::bf16, {1, 6});
  EXPECT_THROW(kernels().attention_forward(inputs.shape(), {}, qkv.view(), out.view(), narrow.view()), ContractError);
  inputs.starts[2] = 3;
  EXPECT_THROW(kernels().attention_forward(inputs.shape(), {}, qkv.view(), out.view(), logsumexp.view()), ContractError);
  EXPECT_THROW(kernels().attention_decode(1, 2, 4, token.view(), cache.view(), cache.view(), out.view().rows(0, 1)),
               ContractError);
}

}  // namespace
}  // namespace tandem::device_test

// SPDX-License-Identifier: Apache-2.0
// Attention that keeps its probabilities.
#include "kernels/cuda/attention_test_support.h"

namespace tandem::device_test {
namespace {

using CudaMaterializedAttention = DeviceTest;

/// Forward, then backward from the probabilities that it stored, or from `kept`; `dtype` in place of the setting's.
Results run_materialized(Kernels& kernels, const Inputs& inputs, DType dtype, const std::vector<double>* kept = nullptr) {
  const Setting& s = inputs.setting;
  const Shape matrix = {s.rows, s.heads, s.sequence, s.sequence};
  DeviceTensor qkv(kernels, dtype, s.qkv_shape(), inputs.qkv, s.place), dout(kernels, dtype, s.out_shape(), inputs.dout, s.place);
  DeviceTensor out(kernels, dtype, s.out_shape(), s.place), dqkv(kernels, dtype, s.qkv_shape(), s.place);
  DeviceTensor probabilities(kernels, dtype, matrix, s.place);
  kernels.attention_materialized_forward(inputs.shape(), inputs.dropout(), qkv.view(), out.view(), probabilities.view());
  const std::vector<double> stored = probabilities.values();
  DeviceTensor used(kernels, dtype, matrix, kept == nullptr ? stored : *kept, s.place);
  kernels.attention_materialized_backward(inputs.shape(), inputs.dropout(), dout.view(), qkv.view(), used.view(), dqkv.view());
  return {out.values(), dqkv.values(), stored};
}

// One key, less than a tile of queries, one more than a tile, several; documents that start inside tiles; masks; a part of the
// heads.
const Setting kWide[] = {{.dtype = DType::f64, .rows = 0, .sequence = 4, .heads = 2, .head_size = 3},
                         {.dtype = DType::f32, .rows = 1, .sequence = 1},
                         {.dtype = DType::f64,
                          .rows = 2,
                          .sequence = 37,
                          .heads = 2,
                          .head_size = 7,
                          .documents = true,
                          .dropout = 0.3,
                          .total_heads = 5,
                          .first_head = 3},
                         {.dtype = DType::f32, .rows = 1, .sequence = 65, .heads = 2, .head_size = 64, .documents = true}};

TEST_F(CudaMaterializedAttention, MatchesTheDefinitionInSingleAndDouble) {
  for (const Setting& s : kWide) {
    SCOPED_TRACE(s.text());
    const Inputs inputs(s);

    const Results got = run_materialized(kernels(), inputs, s.dtype);

    const Results truth = reference_attention<double>(inputs);
    const Results same = s.dtype == DType::f32 ? reference_attention<float>(inputs) : Results{};
    expect_close("out", got.out, truth.out, s.dtype, same.out, s.chain());
    expect_close("dqkv", got.dqkv, truth.dqkv, s.dtype, same.dqkv, s.chain());
    expect_close("probabilities", got.statistics, truth.statistics, s.dtype, same.statistics, s.chain());
    for (std::size_t i = 0; i < truth.statistics.size(); ++i) {
      ASSERT_EQ(got.statistics[i] == 0, truth.statistics[i] == 0) << "probability " << i;
    }
  }
}

/// out of probabilities as they were kept.
std::vector<double> out_of_kept(const Inputs& inputs, const std::vector<double>& kept) {
  const Setting& s = inputs.setting;
  std::vector<double> out;
  for (std::int64_t row = 0; row < s.rows; ++row) {
    for (std::int64_t t = 0; t < s.sequence; ++t) {
      for (std::int64_t c = 0; c < s.width(); ++c) {
        double sum = 0;
        for (std::int64_t key = 0; key <= t; ++key) {
          const std::int64_t head = c / s.head_size, side = inputs.side();
          const std::int64_t mask = ((inputs.row_ids[static_cast<std::size_t>(row)] * s.heads + head) * side + t) * side + key;
          const bool keep = inputs.key.word(static_cast<std::uint64_t>(mask)) >= dropout_threshold(s.dropout);
          const double p = kept[static_cast<std::size_t>(((row * s.heads + head) * s.sequence + t) * s.sequence + key)];
          sum += (keep ? p / (1 - s.dropout) : 0) *
                 inputs.qkv[static_cast<std::size_t>((row * s.sequence + key) * 3 * s.width() + 2 * s.width() + c)];
        }
        out.push_back(sum);
      }
    }
  }
  return out;
}

TEST_F(CudaMaterializedAttention, In16BitsUsesProbabilitiesAsTheyAreKept) {
  for (const Setting& s :
       {Setting{.dtype = DType::bf16, .rows = 2, .sequence = 35, .heads = 2, .head_size = 24, .documents = true, .dropout = 0.3},
        Setting{.dtype = DType::f16, .rows = 1, .sequence = 20, .heads = 1, .head_size = 64, .place = Place::odd}}) {
    SCOPED_TRACE(s.text());
    const Inputs inputs(s);

    const Results got = run_materialized(kernels(), inputs, s.dtype);

    expect_close("probabilities", got.statistics, reference_attention<double>(inputs).statistics, s.dtype, {}, s.chain());
    expect_close("out", got.out, out_of_kept(inputs, got.statistics), s.dtype, {}, s.chain());
    expect_close("dqkv", got.dqkv, run_materialized(kernels(), inputs, DType::f64, &got.statistics).dqkv, s.dtype, {}, s.chain());
  }
}

}  // namespace
}  // namespace tandem::device_test

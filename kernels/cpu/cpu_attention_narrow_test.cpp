// SPDX-License-Identifier: Apache-2.0
// Attention on 16-bit tensors: the arithmetic of fp32 tensors of the same numbers, each result rounded once.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cpu/attention_test_support.h"
#include "kernels/cpu/narrow_test_support.h"

namespace tandem::cpu {
namespace {

const std::vector<Setting> kSettings = {{0, 4, 2, 3, false, 0},    {1, 1, 1, 1, false, 0},    {2, 5, 3, 7, true, 0.3},
                                        {2, 67, 3, 24, true, 0},   {2, 97, 2, 20, true, 0.2}, {1, 70, 2, 64, false, 0},
                                        {1, 193, 2, 33, true, 0.5}};

struct Variant {
  std::string instruction_set;
  DType dtype;
};

class NarrowAttention : public testing::TestWithParam<Variant> {
 protected:
  [[nodiscard]] DType dtype() const { return GetParam().dtype; }
  [[nodiscard]] CpuKernelsOptions options() const { return {.instruction_set = GetParam().instruction_set}; }
  [[nodiscard]] std::vector<double> random(std::int64_t count, std::uint64_t seed) const {
    return rounded_values(dtype(), count, seed);
  }
};

struct Call {
  AttentionShape shape;
  DropoutSpec dropout;
  explicit Call(const Inputs& inputs) {
    const Setting& s = inputs.setting;
    shape = {.rows = s.rows,
             .sequence = s.sequence,
             .heads = s.heads,
             .head_size = s.head_size,
             .document_starts = inputs.starts,
             .dropout_sequence = inputs.model_sequence};
    dropout = {.key = inputs.key,
               .probability = s.dropout,
               .row_ids = inputs.row_ids,
               .row_elements = s.heads * inputs.model_sequence * inputs.model_sequence};
  }
};

std::vector<double> rounded(std::vector<double> values, DType dtype) {
  for (double& value : values) value = static_cast<double>(round_to(static_cast<float>(value), dtype));
  return values;
}

TEST_P(NarrowAttention, IsThatOfFp32RoundedOnce) {
  for (const Setting& s : kSettings) {
    SCOPED_TRACE(fmt::format("{} rows of {}, {} heads of {}", s.rows, s.sequence, s.heads, s.head_size));
    const Inputs inputs = make_inputs(s);
    const Call call(inputs);
    const std::int64_t tokens = s.rows * s.sequence, width = s.heads * s.head_size;
    const Shape of_qkv = {tokens, 3 * width}, of_out = {tokens, width}, of_heads = {s.rows, s.heads, s.sequence};
    const auto qkv = random(tokens * 3 * width, 1), dout = random(tokens * width, 2);
    // Forward, and backward from the out that the 16-bit forward stored.
    const auto run = [&](Kernels& kernels, DType d, const std::vector<double>& kept_out) -> Outputs<double> {
      StoredTensor gqkv(d, of_qkv, qkv), gdout(d, of_out, dout), out(d, of_out), logsumexp(DType::f32, of_heads), dqkv(d, of_qkv);
      kernels.attention_forward(call.shape, call.dropout, gqkv.view(), out.view(), logsumexp.view());
      StoredTensor kept(d, of_out, kept_out.empty() ? out.values() : kept_out);
      kernels.attention_backward(call.shape, call.dropout, gdout.view(), gqkv.view(), kept.view(), logsumexp.view(), dqkv.view());
      return {out.values(), logsumexp.values(), dqkv.values()};
    };
    const auto got = same_with_any_threads(options(), [&](Kernels& kernels) { return run(kernels, dtype(), {}); });
    if (got.empty()) GTEST_SKIP() << "not available here";

    const auto wide = run(*try_kernels(1, GetParam().instruction_set), DType::f32, got[0]);
    EXPECT_TRUE(same_bits<double>(got, {rounded(wide[0], dtype()), wide[1], rounded(wide[2], dtype())}));

    const auto truth = reference_attention<double>(inputs, qkv, dout)[0];
    const double u = unit_roundoff(dtype()), chain = static_cast<double>(s.head_size + s.sequence);
    EXPECT_LE(relative_error(got[0], truth), u + 4 * unit_roundoff(DType::f32) * std::sqrt(chain));
  }
}

/// Two segments of keys, [0, 20) and [20, 37), of one row of queries [17, 37).
class TwoSegments {
 public:
  static constexpr std::int64_t kQueries = 20, kKeys = 37, kHead = 12;
  static constexpr int kHeads = 2;
  static constexpr std::int64_t kWidth = kHeads * kHead;

  TwoSegments(DType dtype, DType sums, const std::vector<double>& out, const std::vector<double>& logsumexp,
              const std::vector<double>& gradients)
      : q_(dtype, {kQueries, kWidth}, rounded_values(DType::bf16, kQueries * kWidth, 1)),
        k_(dtype, {kKeys, kWidth}, rounded_values(DType::bf16, kKeys * kWidth, 2)),
        v_(dtype, {kKeys, kWidth}, rounded_values(DType::bf16, kKeys * kWidth, 3)),
        dout_(dtype, {kQueries, kWidth}, rounded_values(DType::bf16, kQueries * kWidth, 4)),
        out_(sums, {1, kQueries, kWidth}, out),
        logsumexp_(DType::f32, {1, kHeads, kQueries}, logsumexp),
        dq_(sums, {kQueries, kWidth}, {gradients.begin(), gradients.begin() + kQueries * kWidth}),
        dk_(sums, {kKeys, kWidth}, gradients),
        dv_(sums, {kKeys, kWidth}, gradients) {}

  void forward(Kernels& kernels, bool second) {
    kernels.attention_segment_forward(segment(second), {}, rows(q_, 0), rows(k_, first(second)), rows(v_, first(second)),
                                      out_.view(), logsumexp_.view());
  }
  void backward(Kernels& kernels, bool second) {
    kernels.attention_segment_backward(segment(second), {}, dout_.view(), rows(q_, 0), rows(k_, first(second)),
                                       rows(v_, first(second)), out_.view(), logsumexp_.view(), rows(dq_, 0),
                                       rows(dk_, first(second)), rows(dv_, first(second)));
  }
  [[nodiscard]] std::vector<double> out() const { return out_.values(); }
  [[nodiscard]] std::vector<double> logsumexp() const { return logsumexp_.values(); }
  [[nodiscard]] Outputs<double> gradients() const { return {dq_.values(), dk_.values(), dv_.values()}; }

 private:
  static std::int64_t first(bool second) { return second ? 20 : 0; }
  static AttentionSegment segment(bool second) {
    return {.rows = 1,
            .queries = kQueries,
            .keys = second ? 17 : 20,
            .query_begin = 17,
            .key_begin = first(second),
            .heads = kHeads,
            .head_size = kHead,
            .document_starts = {}};
  }
  static StridedRows rows(StoredTensor& tensor, std::int64_t token) { return {tensor.view(), token * kWidth, 0, kWidth}; }

  StoredTensor q_, k_, v_, dout_, out_, logsumexp_, dq_, dk_, dv_;
};

TEST_P(NarrowAttention, SegmentsRoundWhatTheyAddToOnce) {
  const auto kernels = try_kernels(2, GetParam().instruction_set);
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const std::vector<double> none(TwoSegments::kQueries * TwoSegments::kWidth, 0.0);
  const std::vector<double> unseen(TwoSegments::kQueries * TwoSegments::kHeads, -std::numeric_limits<double>::infinity());
  const auto gradients = rounded_values(dtype(), TwoSegments::kKeys * TwoSegments::kWidth, 5);
  TwoSegments got(dtype(), dtype(), none, unseen, gradients), into_fp32(dtype(), DType::f32, none, unseen, gradients);
  std::vector<double> out = none, logsumexp = unseen;
  for (const bool second : {false, true}) {
    TwoSegments wide(DType::f32, DType::f32, out, logsumexp, gradients);
    wide.forward(*kernels, second);
    got.forward(*kernels, second);
    into_fp32.forward(*kernels, second);
    out = rounded(wide.out(), dtype());
    logsumexp = wide.logsumexp();
    EXPECT_TRUE(same_bits<double>({got.out(), got.logsumexp()}, {out, logsumexp})) << "segment " << second;
  }
  // Queries [17, 37) attend: a second pass in fp32 alone says what out is without rounding between segments.
  TwoSegments exact(DType::f32, DType::f32, none, unseen, gradients);
  exact.forward(*kernels, false);
  exact.forward(*kernels, true);
  EXPECT_EQ(into_fp32.out(), exact.out());

  TwoSegments wide(DType::f32, DType::f32, out, logsumexp, gradients);
  wide.backward(*kernels, true);
  got.backward(*kernels, true);
  Outputs<double> expected = wide.gradients();
  for (auto& values : expected) values = rounded(values, dtype());
  EXPECT_TRUE(same_bits(got.gradients(), expected));
}

TEST_P(NarrowAttention, DecodingIsThatOfFp32RoundedOnce) {
  constexpr std::int64_t kRows = 2, kHead = 10, kLength = 18, kCapacity = 23;
  constexpr int kHeads = 3;
  constexpr std::int64_t kWidth = kHeads * kHead;
  const auto qkv = random(kRows * 3 * kWidth, 1), cache = random(kRows * kCapacity * kWidth, 2);
  const auto run = [&](Kernels& kernels, DType d) -> Outputs<double> {
    StoredTensor in(d, {kRows, 3 * kWidth}, qkv), keys(d, {kRows, kCapacity, kWidth}, cache), out(d, {kRows, kWidth});
    StoredTensor values(d, {kRows, kCapacity, kWidth}, cache);
    kernels.attention_decode(kHeads, kHead, kLength, in.view(), keys.view(), values.view(), out.view());
    return {out.values(), keys.values(), values.values()};
  };
  const auto got = same_with_any_threads(options(), [&](Kernels& kernels) { return run(kernels, dtype()); });
  if (got.empty()) GTEST_SKIP() << "not available here";
  const auto wide = run(*try_kernels(1, GetParam().instruction_set), DType::f32);
  EXPECT_TRUE(same_bits<double>(got, {rounded(wide[0], dtype()), wide[1], wide[2]}));
}

TEST_P(NarrowAttention, RefusesStatisticsIn16Bits) {
  const auto kernels = try_kernels(1, GetParam().instruction_set);
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const Inputs inputs = make_inputs({1, 4, 1, 2, false, 0});
  const Call call(inputs);
  StoredTensor qkv(dtype(), {4, 6}, random(24, 1)), out(dtype(), {4, 2}), logsumexp(dtype(), {1, 1, 4});
  EXPECT_THROW(kernels->attention_forward(call.shape, call.dropout, qkv.view(), out.view(), logsumexp.view()), ContractError);
}

INSTANTIATE_TEST_SUITE_P(Variants, NarrowAttention,
                         testing::Values(Variant{"avx512", DType::bf16}, Variant{"avx512", DType::f16},
                                         Variant{"avx2", DType::bf16}, Variant{"baseline", DType::f16}),
                         [](const auto& test) {
                           return fmt::format("{}_{}", test.param.instruction_set, name(test.param.dtype));
                         });

}  // namespace
}  // namespace tandem::cpu

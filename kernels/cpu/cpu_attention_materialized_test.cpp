// SPDX-License-Identifier: Apache-2.0
// Attention that keeps its probabilities.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cpu/attention_test_support.h"
#include "kernels/cpu/narrow_test_support.h"

namespace tandem::cpu {
namespace {

// One key, less than a tile of queries, one more than a tile, several; documents that start inside tiles; masks.
const std::vector<Setting> kSettings = {{0, 4, 2, 3, false, 0},   {1, 1, 1, 1, false, 0},    {2, 5, 3, 7, true, 0.3},
                                        {1, 65, 2, 16, false, 0}, {2, 67, 3, 24, true, 0},   {2, 131, 2, 20, true, 0.2},
                                        {1, 97, 2, 64, false, 0}, {1, 193, 1, 33, true, 0.5}};

struct Call {
  AttentionShape shape;
  DropoutSpec dropout;
  explicit Call(const Inputs& inputs, int total_heads = 0, int first_head = 0) {
    const Setting& s = inputs.setting;
    const std::int64_t mask_heads = total_heads == 0 ? s.heads : total_heads;
    shape = {.rows = s.rows,
             .sequence = s.sequence,
             .heads = s.heads,
             .head_size = s.head_size,
             .document_starts = inputs.starts,
             .dropout_sequence = inputs.model_sequence,
             .total_heads = total_heads,
             .first_head = first_head};
    dropout = {.key = inputs.key,
               .probability = s.dropout,
               .row_ids = inputs.row_ids,
               .row_elements = mask_heads * inputs.model_sequence * inputs.model_sequence};
  }
};

struct Shapes {
  Shape qkv, out, heads, matrix;
  explicit Shapes(const Setting& s)
      : qkv{s.rows * s.sequence, 3 * s.heads * s.head_size},
        out{s.rows * s.sequence, s.heads * s.head_size},
        heads{s.rows, s.heads, s.sequence},
        matrix{s.rows, s.heads, s.sequence, s.sequence} {}
};

/// out, dqkv and the probabilities.
template <class Real>
Outputs<Real> materialized(Kernels& kernels, const Setting& s, const Call& call, const std::vector<Real>& qkv,
                           const std::vector<Real>& dout) {
  const Shapes shapes(s);
  Guarded<Real> gqkv(shapes.qkv, qkv), gdout(shapes.out, dout), out(shapes.out), kept(shapes.matrix), dqkv(shapes.qkv);
  kernels.attention_materialized_forward(call.shape, call.dropout, gqkv.view(), out.view(), kept.view());
  kernels.attention_materialized_backward(call.shape, call.dropout, gdout.view(), gqkv.view(), kept.view(), dqkv.view());
  return {out.values(), dqkv.values(), kept.values()};
}

template <class Real>
Outputs<Real> blocked(Kernels& kernels, const Setting& s, const Call& call, const std::vector<Real>& qkv,
                      const std::vector<Real>& dout) {
  const Shapes shapes(s);
  Guarded<Real> gqkv(shapes.qkv, qkv), gdout(shapes.out, dout), out(shapes.out), logsumexp(shapes.heads), dqkv(shapes.qkv);
  kernels.attention_forward(call.shape, call.dropout, gqkv.view(), out.view(), logsumexp.view());
  kernels.attention_backward(call.shape, call.dropout, gdout.view(), gqkv.view(), out.view(), logsumexp.view(), dqkv.view());
  return {out.values(), dqkv.values()};
}

reference::AttentionInput definition(const Inputs& inputs) {
  const Setting& s = inputs.setting;
  return {.heads = s.heads,
          .hidden = s.heads * s.head_size,
          .rows = {inputs.row_ids, s.sequence, inputs.model_sequence},
          .document_starts = inputs.starts,
          .dropout = {s.dropout, inputs.key}};
}

class MaterializedAttention : public testing::TestWithParam<const char*> {
 protected:
  template <class Real>
  void check();
};

template <class Real>
void MaterializedAttention::check() {
  for (const Setting& s : kSettings) {
    SCOPED_TRACE(fmt::format("{} rows of {}, {} heads of {}", s.rows, s.sequence, s.heads, s.head_size));
    const Inputs inputs = make_inputs(s);
    const Call call(inputs);
    const std::int64_t tokens = s.rows * s.sequence, width = s.heads * s.head_size;
    const auto qkv = random_values<Real>(tokens * 3 * width, 1), dout = random_values<Real>(tokens * width, 2);
    auto got = with_any_threads<Real>(GetParam(), "auto",
                                      [&](Kernels& kernels) { return materialized<Real>(kernels, s, call, qkv, dout); });
    if (got.empty()) GTEST_SKIP() << "not available here";

    const double chain = static_cast<double>(s.head_size + s.sequence);
    const auto of_blocks = blocked<Real>(*try_kernels(1, GetParam()), s, call, qkv, dout);
    const auto as_double = [](const std::vector<Real>& values) { return std::vector<double>(values.begin(), values.end()); };
    expect_close<Real>({got[0], got[1]}, {as_double(of_blocks[0]), as_double(of_blocks[1])}, {}, chain);

    auto truth = reference_attention<double>(inputs, as_double(qkv), as_double(dout));
    std::vector<double> probabilities(got[2].size()), out(dout.size());
    reference::attention_forward<double>(definition(inputs), as_double(qkv), out, probabilities);
    truth.push_back(probabilities);
    auto same_precision = reference_attention<Real>(inputs, qkv, dout);
    same_precision.push_back(std::vector<Real>(probabilities.begin(), probabilities.end()));
    expect_close<Real>(got, truth, same_precision, chain);
    for (std::size_t i = 0; i < probabilities.size(); ++i) {
      ASSERT_EQ(got[2][i] == Real(0), probabilities[i] == 0.0) << "probability " << i;
    }
  }
}

TEST_P(MaterializedAttention, MatchesTheDefinitionAndTheBlockedOneInSingle) { check<float>(); }
TEST_P(MaterializedAttention, MatchesTheDefinitionAndTheBlockedOneInDouble) { check<double>(); }

TEST_P(MaterializedAttention, HeadsDealtToRanksDrawTheirMasksOfTheWhole) {
  const auto kernels = try_kernels(2, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const Inputs inputs = make_inputs({2, 37, 2, 12, true, 0.4});
  const auto qkv = random_values<double>(2 * 37 * 3 * 24, 1), dout = random_values<double>(2 * 37 * 24, 2);
  for (const int first_head : {0, 3}) {
    const Call call(inputs, 5, first_head);
    const auto got = materialized<double>(*kernels, inputs.setting, call, qkv, dout);
    const auto expected = blocked<double>(*kernels, inputs.setting, call, qkv, dout);
    expect_close<double>({got[0], got[1]}, expected, {}, 12 + 37);
  }
}

/// out of the probabilities as they were kept: dropping and summing round once for each key that a query sees.
Expected out_of_kept(const Inputs& inputs, const std::vector<double>& kept, const std::vector<double>& qkv) {
  const Setting& s = inputs.setting;
  const std::int64_t width = s.heads * s.head_size;
  Expected out;
  for (std::int64_t row = 0; row < s.rows; ++row) {
    for (std::int64_t t = 0; t < s.sequence; ++t) {
      for (std::int64_t c = 0; c < width; ++c) {
        double sum = 0, size = 0;
        for (std::int64_t key = 0; key <= t; ++key) {
          const std::int64_t head = c / s.head_size, side = inputs.model_sequence;
          const auto mask = ((inputs.row_ids[static_cast<std::size_t>(row)] * s.heads + head) * side + t) * side + key;
          const bool keep = inputs.key.word(static_cast<std::uint64_t>(mask)) >= dropout_threshold(s.dropout);
          const double p = kept[static_cast<std::size_t>(((row * s.heads + head) * s.sequence + t) * s.sequence + key)];
          const double term = (keep ? p / (1 - s.dropout) : 0) *
                              qkv[static_cast<std::size_t>((row * s.sequence + key) * 3 * width + 2 * width + c)];
          sum += term;
          size += std::fabs(term);
        }
        out.values.push_back(sum);
        out.arithmetic_error.push_back(static_cast<double>(s.sequence + 2) * unit_roundoff(DType::f32) * size);
      }
    }
  }
  return out;
}

void check_narrow(const std::string& set, DType d) {
  for (const Setting& s : kSettings) {
    SCOPED_TRACE(fmt::format("{}, {} rows of {}, {} heads of {}", name(d), s.rows, s.sequence, s.heads, s.head_size));
    const Inputs inputs = make_inputs(s);
    const Call call(inputs);
    const Shapes shapes(s);
    const auto qkv = rounded_values(d, num_elements(shapes.qkv), 1), dout = rounded_values(d, num_elements(shapes.out), 2);
    const auto got = same_with_any_threads({.instruction_set = set}, [&](Kernels& kernels) -> Outputs<double> {
      StoredTensor gqkv(d, shapes.qkv, qkv), gdout(d, shapes.out, dout), out(d, shapes.out), kept(d, shapes.matrix);
      StoredTensor dqkv(d, shapes.qkv);
      kernels.attention_materialized_forward(call.shape, call.dropout, gqkv.view(), out.view(), kept.view());
      kernels.attention_materialized_backward(call.shape, call.dropout, gdout.view(), gqkv.view(), kept.view(), dqkv.view());
      return {out.values(), dqkv.values(), kept.values()};
    });
    if (got.empty()) GTEST_SKIP() << "not available here";

    // A probability is a number of the dtype, from a score whose sum has one roundoff per channel and from a sum over the keys.
    std::vector<double> out(dout.size());
    Expected probabilities{std::vector<double>(got[2].size()), {}};
    reference::attention_forward<double>(definition(inputs), qkv, out, probabilities.values);
    const double u32 = unit_roundoff(DType::f32), chain = static_cast<double>(s.head_size + s.sequence);
    const double largest_score = 6.0 * std::sqrt(static_cast<double>(s.head_size));
    for (const double p : probabilities.values) {
      probabilities.arithmetic_error.push_back(p * u32 * (chain + static_cast<double>(s.head_size) * largest_score));
    }
    expect_stored(got[2], probabilities, d, "probabilities");

    expect_stored(got[0], out_of_kept(inputs, got[2], qkv), d, "out");

    std::vector<double> dqkv(qkv.size());
    reference::attention_backward<double>(definition(inputs), qkv, got[2], dout, dqkv);
    EXPECT_LE(relative_error(got[1], dqkv), unit_roundoff(d) + 8 * u32 * std::sqrt(chain));
  }
}

TEST_P(MaterializedAttention, KeepsAndUsesProbabilitiesOf16Bits) {
  check_narrow(GetParam(), DType::bf16);
  check_narrow(GetParam(), DType::f16);
}

TEST_P(MaterializedAttention, RefusesProbabilitiesOfAnotherShapeOrDtype) {
  const auto kernels = try_kernels(1, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const Inputs inputs = make_inputs({1, 4, 1, 2, false, 0});
  const Call call(inputs);
  Guarded<float> qkv({4, 6}, random_values<float>(24, 1)), out({4, 2}), small({1, 1, 4, 3});
  Guarded<double> wide({1, 1, 4, 4});
  EXPECT_THROW(kernels->attention_materialized_forward(call.shape, call.dropout, qkv.view(), out.view(), small.view()),
               ContractError);
  EXPECT_THROW(kernels->attention_materialized_forward(call.shape, call.dropout, qkv.view(), out.view(), wide.view()),
               ContractError);
}

INSTANTIATE_TEST_SUITE_P(Sets, MaterializedAttention, testing::ValuesIn(kInstructionSets),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace tandem::cpu

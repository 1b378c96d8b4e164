// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "kernels/cuda/device_test_support.h"
#include "reference/attention.h"
#include "reference/ops.h"

/// What the tests of attention share: settings, inputs, calls, the definition.
namespace tandem::device_test {

struct Setting {
  DType dtype = DType::f32;
  std::int64_t rows = 1, sequence = 1;
  int heads = 1;
  std::int64_t head_size = 1;
  bool documents = false;
  double dropout = 0;
  Place place = Place::aligned;
  std::int64_t side_beyond = 3;  ///< how much longer than `sequence` the model's sequence is, the side of the mask
  int total_heads = 0, first_head = 0;

  [[nodiscard]] std::string text() const {
    return fmt::format("{}, {} rows of {}, {} heads of {}{}{}{}", name(dtype), rows, sequence, heads, head_size,
                       documents ? ", documents" : "", dropout > 0 ? ", dropout" : "", place == Place::odd ? ", odd" : "");
  }
  [[nodiscard]] std::int64_t tokens() const { return rows * sequence; }
  [[nodiscard]] std::int64_t width() const { return heads * head_size; }
  [[nodiscard]] Shape qkv_shape() const { return {tokens(), 3 * width()}; }
  [[nodiscard]] Shape out_shape() const { return {tokens(), width()}; }
  [[nodiscard]] Shape statistics_shape() const { return {rows, heads, sequence}; }
  /// Roundings behind a result: two sums follow each other, over the head's channels and over the keys.
  [[nodiscard]] double chain() const { return static_cast<double>(head_size + sequence); }
};

/// What a call takes beside tensors.
struct Inputs {
  Setting setting;
  std::vector<std::int32_t> starts;
  std::vector<std::int64_t> row_ids;
  DropoutKey key = {.seed = 0x123456789abcdefULL, .step = 7, .layer = 2, .site = DropoutSite::attention_probability};
  std::vector<double> qkv, dout;

  explicit Inputs(const Setting& s)
      : setting(s),
        qkv(random_numbers(s.dtype, s.tokens() * 3 * s.width(), 1)),
        dout(random_numbers(s.dtype, s.tokens() * s.width(), 2)) {
    // Documents of 1, 3, 7, ... tokens, the second row's of 11, 23, ..., the rest of the row being the last one.
    for (std::int64_t row = 0; row < s.rows; ++row) {
      row_ids.push_back(11 - 2 * row);
      std::int64_t start = 0, length = 1 + row * 10;
      for (std::int64_t t = 0; t < s.sequence; ++t) {
        if (s.documents && t == start + length && s.sequence - t > 20) {
          start = t;
          length = 2 * length + 1;
        }
        starts.push_back(static_cast<std::int32_t>(start));
      }
    }
  }

  [[nodiscard]] std::int64_t side() const { return setting.sequence + setting.side_beyond; }
  [[nodiscard]] AttentionShape shape() const {
    const Setting& s = setting;
    return {s.rows, s.sequence, s.heads, s.head_size, starts, side(), s.total_heads, s.first_head};
  }
  [[nodiscard]] DropoutSpec dropout() const {
    const int heads = setting.total_heads == 0 ? setting.heads : setting.total_heads;
    return {key, setting.dropout, row_ids, heads * side() * side()};
  }
};

struct Results {
  std::vector<double> out, dqkv, statistics;  ///< statistics: logsumexp, or the probabilities
};

/// The definition, in Real.
template <class Real>
Results reference_attention(const Inputs& inputs) {
  const Setting& s = inputs.setting;
  const reference::AttentionInput input{.heads = s.heads,
                                        .hidden = s.width(),
                                        .rows = {inputs.row_ids, s.sequence, inputs.side()},
                                        .document_starts = inputs.starts,
                                        .dropout = {s.dropout, inputs.key},
                                        .total_heads = s.total_heads,
                                        .first_head = s.first_head};
  const std::vector<Real> qkv = as<Real>(inputs.qkv), dout = as<Real>(inputs.dout);
  std::vector<Real> out(dout.size()), dqkv(qkv.size());
  std::vector<Real> probabilities(static_cast<std::size_t>(s.rows * s.heads * s.sequence * s.sequence));
  reference::attention_forward<Real>(input, qkv, out, probabilities);
  reference::attention_backward<Real>(input, qkv, probabilities, dout, dqkv);
  return {as_doubles(out), as_doubles(dqkv), as_doubles(probabilities)};
}

/// Forward, then backward from the out that forward stored, or from `kept_out`; `dtype` in place of the setting's.
inline Results run_attention(Kernels& kernels, const Inputs& inputs, DType dtype, const std::vector<double>* kept_out = nullptr) {
  const Setting& s = inputs.setting;
  DeviceTensor qkv(kernels, dtype, s.qkv_shape(), inputs.qkv, s.place), dout(kernels, dtype, s.out_shape(), inputs.dout, s.place);
  DeviceTensor out(kernels, dtype, s.out_shape(), s.place), dqkv(kernels, dtype, s.qkv_shape(), s.place);
  DeviceTensor logsumexp(kernels, wide(dtype), s.statistics_shape());
  kernels.attention_forward(inputs.shape(), inputs.dropout(), qkv.view(), out.view(), logsumexp.view());
  const std::vector<double> stored = out.values();
  DeviceTensor kept(kernels, dtype, s.out_shape(), kept_out == nullptr ? stored : *kept_out, s.place);
  kernels.attention_backward(inputs.shape(), inputs.dropout(), dout.view(), qkv.view(), kept.view(), logsumexp.view(),
                             dqkv.view());
  return {stored, dqkv.values(), logsumexp.values()};
}

/// The tensor core kernels round probabilities, and the gradients of scores, to 16 bits before they multiply them. Errors of
/// single roundings are independent: one rounding puts a tensor 0.41 unit roundoffs off (root mean square), the result's own and
/// that of what was multiplied 0.5, in gradients, which have two more (of out and of a score's gradient), 0.65. `roundings` is
/// the bound in units.
inline void expect_within_roundings(const std::string& what, const std::vector<double>& got, const std::vector<double>& truth,
                                    DType dtype, double roundings) {
  const double error = relative_error(got, truth), bound = roundings * unit_roundoff(dtype);
  EXPECT_TRUE(error <= bound) << what << ": error " << error << ", bound " << bound;
}

}  // namespace tandem::device_test

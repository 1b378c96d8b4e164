// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "kernels/cpu/test_support.h"
#include "reference/attention.h"
#include "reference/ops.h"

/// What the tests of attention share: inputs, and the definition.
namespace tandem::cpu {

struct Setting {
  std::int64_t rows, sequence;
  int heads;
  std::int64_t head_size;
  bool documents;
  double dropout;
};

/// Documents of 1, 2, 3, ... tokens, the rest of the row being the last one; the second row is shifted.
inline std::vector<std::int32_t> make_starts(const Setting& s) {
  std::vector<std::int32_t> starts;
  for (std::int64_t row = 0; row < s.rows; ++row) {
    std::int64_t start = 0, length = 1 + row * 10;
    for (std::int64_t t = 0; t < s.sequence; ++t) {
      if (s.documents && t == start + length && s.sequence - t > 20) {
        start = t;
        length = 2 * length + 1;
      }
      starts.push_back(static_cast<std::int32_t>(start));
    }
  }
  return starts;
}

struct Inputs {
  Setting setting;
  std::vector<std::int32_t> starts;
  std::vector<std::int64_t> row_ids;
  std::int64_t model_sequence;
  DropoutKey key;
};

inline Inputs make_inputs(const Setting& s) {
  Inputs inputs{s,
                make_starts(s),
                {},
                s.sequence + 3,
                {.seed = 0x123456789abcdefULL, .step = 7, .layer = 2, .site = DropoutSite::attention_probability}};
  for (std::int64_t row = 0; row < s.rows; ++row) inputs.row_ids.push_back(11 - 2 * row);
  return inputs;
}

template <class Real>
Outputs<Real> reference_attention(const Inputs& inputs, const std::vector<Real>& qkv, const std::vector<Real>& dout) {
  const Setting& s = inputs.setting;
  const reference::AttentionInput input{.heads = s.heads,
                                        .hidden = s.heads * s.head_size,
                                        .rows = {inputs.row_ids, s.sequence, inputs.model_sequence},
                                        .document_starts = inputs.starts,
                                        .dropout = {s.dropout, inputs.key}};
  std::vector<Real> out(dout.size()), dqkv(qkv.size());
  std::vector<Real> probabilities(static_cast<std::size_t>(s.rows * s.heads * s.sequence * s.sequence));
  reference::attention_forward<Real>(input, qkv, out, probabilities);
  reference::attention_backward<Real>(input, qkv, probabilities, dout, dqkv);
  return {out, dqkv};
}

}  // namespace tandem::cpu

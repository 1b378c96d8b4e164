// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "harness/evidence.h"

namespace tandem {

struct PairInputs;

struct StageTensor {
  std::string name;
  std::vector<double> values;  ///< of the whole tensor, row-major
};

/// A stage of evidence from whole tensors by global name. The fused query-key-value bias becomes two tensors: the true
/// gradient of its key third is zero (softmax ignores a shift of all scores of a query), "h.0.attn.c_attn.bias[key]"; that of its
/// query third is a small difference of large terms, a thousandth of the value third in deep layers, so that an error relative to
/// it alone says little: "h.0.attn.c_attn.bias[query, value]".
[[nodiscard]] StageEvidence make_stage(const PairInputs& inputs, std::string_view stage, int step,
                                       std::vector<StageTensor> tensors);

}  // namespace tandem

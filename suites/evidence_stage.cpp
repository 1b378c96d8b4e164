// SPDX-License-Identifier: Apache-2.0
#include "suites/evidence_stage.h"

#include <algorithm>

#include "suites/pair.h"

namespace tandem {

StageEvidence make_stage(const PairInputs& inputs, std::string_view stage, int step, std::vector<StageTensor> tensors) {
  constexpr std::string_view kFusedBias = "attn.c_attn.bias";
  // The longest sum behind any element: over the tokens of the batch, a row of the widest matrix (of the MLP, or of the fused
  // query-key-value), or the vocabulary.
  const std::int64_t tokens = inputs.plan.batch.rows * inputs.data->sequence();
  const auto longest =
      static_cast<double>(std::max({tokens, inputs.model.mlp_width(), 3 * inputs.model.hidden, inputs.model.vocabulary}));
  StageEvidence evidence;
  evidence.stage = stage;
  evidence.step = step;
  for (StageTensor& tensor : tensors) {
    if (!tensor.name.ends_with(kFusedBias)) {
      evidence.tensors.push_back({std::move(tensor.name), std::move(tensor.values), longest, false});
      continue;
    }
    const auto third = static_cast<std::ptrdiff_t>(tensor.values.size() / 3);
    const auto begin = tensor.values.begin();
    std::vector<double> query_value(begin, begin + third);
    query_value.insert(query_value.end(), begin + 2 * third, tensor.values.end());
    evidence.tensors.push_back({tensor.name + "[query, value]", std::move(query_value), longest, false});
    evidence.tensors.push_back({tensor.name + "[key]", {begin + third, begin + 2 * third}, longest, true});
  }
  return evidence;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/gradient_sources.h"

namespace tandem {

std::vector<int> gradient_sources(const LocalParameter& parameter, bool embedding, bool tied_head) {
  if (parameter.spec.layer >= 0) return {parameter.spec.layer};
  switch (parameter.spec.kind) {
    case ParameterKind::position_embedding: return {kPositionSource};
    case ParameterKind::norm_weight:
    case ParameterKind::norm_bias: return {kFinalNormSource};
    case ParameterKind::token_embedding: break;
    default: return {kHeadSource};
  }
  std::vector<int> sources;
  if (embedding) sources.push_back(kEmbeddingSource);
  if (tied_head) sources.push_back(kHeadSource);
  return sources;
}

bool adds_to(const Operation& op, int source) {
  if (op.kind != OpKind::compute || op.phase != Phase::backward_weight) return false;
  switch (source) {
    case kEmbeddingSource: return op.part == Part::embedding_lookup || op.part == Part::embedding;
    case kPositionSource: return op.part == Part::embedding;
    case kHeadSource:
    case kFinalNormSource: return op.part == Part::head_norm;
    default: return op.layer == source;
  }
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/layout.h"

#include <algorithm>

namespace tandem {

TensorView Carver::take(std::initializer_list<std::int64_t> shape, DType dtype) {
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) elements *= extent;
  TensorView view(memory_ == nullptr ? nullptr : memory_ + used_, dtype, shape);
  const std::int64_t bytes = elements * static_cast<std::int64_t>(tandem::size_bytes(dtype));
  used_ += (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  return view;
}

BlockActivations carve_block(Carver& kept, Carver& rest, const LocalModel& local, const MicroBatchShape& shape,
                             const BlockStorage& storage) {
  Carver& cheap = storage.cheap ? kept : rest;
  Carver& inside = storage.inside ? kept : rest;
  Carver& out = storage.out ? kept : rest;
  const GptConfig& model = local.model;
  const std::int64_t tokens = shape.tokens();
  const std::int64_t slice = token_slice(local, shape).size();
  BlockActivations a;
  a.norm1_mean = inside.take_wide({slice});
  a.norm1_rstd = inside.take_wide({slice});
  a.norm1_out = cheap.take({tokens, model.hidden});
  a.qkv = inside.take({tokens, 3 * local.attention_width()});
  if (local.materialized_attention) {
    a.attention_probabilities = cheap.take({shape.rows, local.heads(), shape.sequence, shape.sequence});
  } else {
    a.logsumexp = inside.take_wide({shape.rows, local.heads(), shape.sequence});
  }
  a.attention_out = inside.take({tokens, local.attention_width()});
  a.middle = inside.take({slice, model.hidden});
  a.norm2_mean = inside.take_wide({slice});
  a.norm2_rstd = inside.take_wide({slice});
  a.norm2_out = cheap.take({tokens, model.hidden});
  if (model.experts == 0) {
    a.fc_out = inside.take({tokens, local.mlp_width()});
    a.gelu_out = cheap.take({tokens, local.mlp_width()});
  } else {
    const ExpertSlots slots = expert_slots(local, shape);
    a.probabilities = inside.take_wide({tokens, model.experts});
    a.gates = inside.take_wide({tokens, model.expert_choices});
    a.expert_in = inside.take({local.experts(), slots.received, model.hidden});
    a.fc_out = inside.take({local.experts(), slots.received, local.mlp_width()});
    a.gelu_out = cheap.take({local.experts(), slots.received, local.mlp_width()});
    a.combine_in = inside.take({model.experts, slots.own, model.hidden});
  }
  a.out = out.take({slice, model.hidden});
  return a;
}

BlockGradients carve_block_gradients(Carver& carver, const LocalModel& local, const MicroBatchShape& shape) {
  const GptConfig& model = local.model;
  const std::int64_t tokens = shape.tokens();
  BlockGradients g;
  g.mlp_out = carver.take({tokens, model.hidden});
  if (model.experts == 0) {
    g.fc_out = carver.take({tokens, local.mlp_width()});
  } else {
    const ExpertSlots slots = expert_slots(local, shape);
    g.router = carver.take_wide({tokens, model.experts});
    g.expert_out = carver.take({local.experts(), slots.received, model.hidden});
    g.fc_out = carver.take({local.experts(), slots.received, local.mlp_width()});
  }
  g.norm2_out = carver.take({tokens, model.hidden});
  g.attention_projection = carver.take({tokens, model.hidden});
  g.attention_out = carver.take({tokens, local.attention_width()});
  g.qkv = carver.take({tokens, 3 * local.attention_width()});
  g.norm1_out = carver.take({tokens, model.hidden});
  return g;
}

std::int64_t ring_elements(const LocalModel& local, const MicroBatchShape& shape, int rank) {
  return shape.rows * context_tokens(local, shape.row_tokens, rank) * 2 * local.attention_width();
}

PassWorkspace carve_pass_workspace(Carver& carver, const LocalModel& local, const MicroBatchShape& shape, bool forward) {
  const GptConfig& model = local.model;
  PassWorkspace w;
  if (local.sequence_parallel && (forward || local.tensor_chunks > 1)) w.partial = carver.take({shape.tokens(), model.hidden});
  if (local.context_ranks > 1) {
    std::int64_t largest = 0;
    for (int rank = 0; rank < local.context_ranks; ++rank) largest = std::max(largest, ring_elements(local, shape, rank));
    for (TensorView& buffer : w.ring) buffer = carver.take({forward ? largest : 2 * largest});
  }
  if (model.experts > 0) {
    const ExpertSlots slots = expert_slots(local, shape);
    // A rank with all experts writes straight to where they are needed in the forward pass.
    if (!forward || local.expert_ranks > 1) w.own = carver.take({model.experts, slots.own, model.hidden});
    if (local.expert_ranks > 1) w.remote = carver.take({local.experts(), slots.received, model.hidden});
    if (!forward) w.gate_gradient = carver.take_wide({shape.tokens(), model.expert_choices});
  }
  return w;
}

TensorView carve_stream(Carver& carver, const LocalModel& local, const MicroBatchShape& shape) {
  return carver.take({token_slice(local, shape).size(), local.model.hidden});
}

HeadActivations carve_head(Carver& carver, const LocalModel& local, const MicroBatchShape& shape) {
  const std::int64_t slice = token_slice(local, shape).size();
  HeadActivations a;
  a.mean = carver.take_wide({slice});
  a.rstd = carver.take_wide({slice});
  a.norm_out = carver.take({shape.tokens(), local.model.hidden});
  return a;
}

int head_pieces(const MicroBatchShape& shape) {
  return static_cast<int>((shape.tokens() + kLogitsChunkTokens - 1) / kLogitsChunkTokens);
}

Interval head_piece(const MicroBatchShape& shape, int piece) {
  const std::int64_t begin = piece * kLogitsChunkTokens;
  return {begin, std::min(begin + kLogitsChunkTokens, shape.tokens())};
}

HeadWorkspace carve_head_workspace(Carver& carver, const LocalModel& local, const MicroBatchShape& shape) {
  const std::int64_t tokens = std::min(shape.tokens(), kLogitsChunkTokens);
  HeadWorkspace w;
  w.logits = carver.take({tokens, local.vocabulary_rows()});
  if (local.tensor_ranks > 1) {
    w.statistics = carver.take_wide({tokens, 3});
    w.gathered = carver.take_wide({local.tensor_ranks, tokens, 3});
    w.logsumexp = carver.take_wide({tokens});
    w.target_logit = carver.take_wide({tokens});
  }
  return w;
}

TensorView carve_head_gradient(Carver& carver, const LocalModel& local, const MicroBatchShape& shape) {
  return carver.take({shape.tokens(), local.model.hidden});
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/layout.h"

#include <algorithm>

namespace tandem {

TensorView Carver::take(std::initializer_list<std::int64_t> shape) {
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) elements *= extent;
  TensorView view(memory_ == nullptr ? nullptr : memory_ + used_, dtype_, shape);
  const std::int64_t bytes = elements * static_cast<std::int64_t>(tandem::size_bytes(dtype_));
  used_ += (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  return view;
}

BlockActivations carve_block(Carver& carver, const GptConfig& model, MicroBatchShape shape) {
  const std::int64_t tokens = shape.tokens();
  BlockActivations a;
  a.norm1_mean = carver.take({tokens});
  a.norm1_rstd = carver.take({tokens});
  a.norm1_out = carver.take({tokens, model.hidden});
  a.qkv = carver.take({tokens, 3 * model.hidden});
  a.logsumexp = carver.take({shape.rows, model.heads, shape.sequence});
  a.attention_out = carver.take({tokens, model.hidden});
  a.middle = carver.take({tokens, model.hidden});
  a.norm2_mean = carver.take({tokens});
  a.norm2_rstd = carver.take({tokens});
  a.norm2_out = carver.take({tokens, model.hidden});
  a.fc_out = carver.take({tokens, model.mlp_width()});
  a.gelu_out = carver.take({tokens, model.mlp_width()});
  a.out = carver.take({tokens, model.hidden});
  return a;
}

BlockGradients carve_block_gradients(Carver& carver, const GptConfig& model, MicroBatchShape shape) {
  const std::int64_t tokens = shape.tokens();
  BlockGradients g;
  g.mlp_out = carver.take({tokens, model.hidden});
  g.fc_out = carver.take({tokens, model.mlp_width()});
  g.norm2_out = carver.take({tokens, model.hidden});
  g.attention_projection = carver.take({tokens, model.hidden});
  g.attention_out = carver.take({tokens, model.hidden});
  g.qkv = carver.take({tokens, 3 * model.hidden});
  g.norm1_out = carver.take({tokens, model.hidden});
  return g;
}

HeadActivations carve_head(Carver& carver, const GptConfig& model, MicroBatchShape shape) {
  const std::int64_t tokens = shape.tokens();
  HeadActivations a;
  a.mean = carver.take({tokens});
  a.rstd = carver.take({tokens});
  a.norm_out = carver.take({tokens, model.hidden});
  return a;
}

HeadWorkspace carve_head_workspace(Carver& carver, const GptConfig& model, MicroBatchShape shape) {
  HeadWorkspace w;
  w.logits = carver.take({std::min(shape.tokens(), kLogitsChunkTokens), model.vocabulary});
  w.norm_gradient = carver.take({shape.tokens(), model.hidden});
  return w;
}

}  // namespace tandem

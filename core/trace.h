// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "core/shard.h"
#include "core/tensor.h"

namespace tandem {

/// One activation, or gradient of one, as a rank has just computed it. Names are those of the reference's tracer: "embedding",
/// "h.0.ln_1", "h.0.attn.c_attn", "h.0.attn", "h.0.attn.c_proj", "h.0.middle", "h.0.ln_2", "h.0.mlp.c_fc", "h.0.mlp.gelu",
/// "h.0.mlp.c_proj" (with experts "h.0.mlp.router" and "h.0.mlp" instead of the three), "h.0", "ln_f", "logits", and "d.NAME" for
/// the gradient of the loss with respect to NAME. Rows and tokens are one dimension: the global shape is [rows * sequence, width]
/// of the whole global batch of the step.
struct TracedTensor {
  std::string name;
  int micro_batch = 0;
  ShardSpec shard;    ///< which part of the global tensor; partial_sum where the ranks of the tensor group must be added
  TensorView values;  ///< lent for the call only; empty slices are not reported
};

/// Sees every traced tensor of a rank in the order of execution, on that rank's thread. Empty: nothing is traced, at no cost.
using TraceSink = std::function<void(const TracedTensor&)>;

}  // namespace tandem

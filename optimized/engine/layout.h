// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/tensor.h"
#include "optimized/engine/local_model.h"

namespace tandem {

/// Blocks start at multiples of this, so that vector loads are aligned.
inline constexpr std::int64_t kAlignmentBytes = 64;

/// Cuts consecutive aligned tensors out of one block of memory; with a null block it only counts.
class Carver {
 public:
  explicit Carver(void* memory, DType dtype) : memory_(static_cast<std::byte*>(memory)), dtype_(dtype) {}
  TensorView take(std::initializer_list<std::int64_t> shape) { return take(shape, dtype_); }
  /// Statistics: fp32 beside 16-bit tensors.
  TensorView take_wide(std::initializer_list<std::int64_t> shape) { return take(shape, wide(dtype_)); }
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return used_; }

 private:
  TensorView take(std::initializer_list<std::int64_t> shape, DType dtype);

  std::byte* memory_;
  DType dtype_;
  std::int64_t used_ = 0;
};

// Below, *slice* means the tokens of token_slice(): all of them, or the tensor rank's part under sequence parallelism. Widths are
// the local ones.

/// What forward keeps of one transformer block for its backward pass. Dense, 4 hidden-sized values per token (outputs of both
/// norms, middle and out; the last two on the slice), 3 + 1 of the attention width and 2 of the MLP width, the statistics of both
/// norms (4 per token of the slice) and of attention (heads per token). No dropout mask; a [T, T] matrix per head only where
/// attention is materialized.
struct BlockActivations {
  TensorView norm1_mean, norm1_rstd, norm1_out, qkv, logsumexp, attention_out, middle, norm2_mean, norm2_rstd, norm2_out, fc_out,
      gelu_out, out;
  /// With experts: probabilities [tokens, experts], gates [tokens, choices], input of the local experts [experts, received slots,
  /// hidden] (fc_out and gelu_out have these rows too) and output of all experts for this rank's slots.
  TensorView probabilities, gates, expert_in, combine_in;
  TensorView attention_probabilities;  ///< [rows, heads, tokens of a row, the same]; materialized attention, without logsumexp
};
/// `kept` gives the memory of what `storage` keeps, `rest` of all else.
BlockActivations carve_block(Carver& kept, Carver& rest, const LocalModel& local, const MicroBatchShape& shape,
                             const BlockStorage& storage);

/// Gradients inside one block between its backward_input and its backward_weight. mlp_out, norm2_out, attention_projection and
/// norm1_out hold all tokens; under sequence parallelism the slice is a part of them.
struct BlockGradients {
  TensorView mlp_out, fc_out, norm2_out, attention_projection, attention_out, qkv, norm1_out;
  TensorView router, expert_out;  ///< with experts: [tokens, experts], [experts, received slots, hidden]
};
BlockGradients carve_block_gradients(Carver& carver, const LocalModel& local, const MicroBatchShape& shape);

/// Scratch of one forward or one backward pass of a chunk.
struct PassWorkspace {
  /// [tokens, hidden], not yet reduce-scattered; under sequence parallelism, in backward only where products are made in pieces
  TensorView partial;
  TensorView ring[2];      ///< keys and values of another context rank, and in backward their gradients, flat
  TensorView own, remote;  ///< all-to-all buffers of the experts: [experts, own slots, hidden], [local experts, received, hidden]
  TensorView gate_gradient;  ///< [tokens, choices]; backward
};
PassWorkspace carve_pass_workspace(Carver& carver, const LocalModel& local, const MicroBatchShape& shape, bool forward);
/// Elements of the keys and values of context rank `rank`: [rows, its tokens, 2 * attention width].
[[nodiscard]] std::int64_t ring_elements(const LocalModel& local, const MicroBatchShape& shape, int rank);

/// [slice, hidden]: the residual stream, or its gradient.
TensorView carve_stream(Carver& carver, const LocalModel& local, const MicroBatchShape& shape);

struct HeadActivations {
  TensorView mean, rstd, norm_out;  ///< [slice], [slice], [tokens, hidden]
};
HeadActivations carve_head(Carver& carver, const LocalModel& local, const MicroBatchShape& shape);

/// Logits exist for this many tokens at a time.
inline constexpr std::int64_t kLogitsChunkTokens = 256;
[[nodiscard]] int head_pieces(const MicroBatchShape& shape);
[[nodiscard]] Interval head_piece(const MicroBatchShape& shape, int piece);
struct HeadWorkspace {
  TensorView logits;                ///< [min(tokens, kLogitsChunkTokens), vocabulary rows]
  TensorView statistics, gathered;  ///< [.., 3], [tensor ranks, .., 3]; several tensor ranks only
  TensorView logsumexp, target_logit;
};
HeadWorkspace carve_head_workspace(Carver& carver, const LocalModel& local, const MicroBatchShape& shape);
/// Gradient of the final norm's output [tokens, hidden], from the head's forward pass to its backward pass.
TensorView carve_head_gradient(Carver& carver, const LocalModel& local, const MicroBatchShape& shape);

}  // namespace tandem

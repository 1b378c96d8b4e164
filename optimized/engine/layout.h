// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/model_config.h"
#include "core/tensor.h"

namespace tandem {

/// Tokens that one micro-batch of one rank computes.
struct MicroBatchShape {
  std::int64_t rows = 0;
  std::int64_t sequence = 0;
  [[nodiscard]] std::int64_t tokens() const noexcept { return rows * sequence; }
};

/// Blocks start at multiples of this, so that vector loads are aligned.
inline constexpr std::int64_t kAlignmentBytes = 64;

/// Cuts consecutive aligned tensors out of one block of memory; with a null block it only counts.
class Carver {
 public:
  explicit Carver(void* memory, DType dtype) : memory_(static_cast<std::byte*>(memory)), dtype_(dtype) {}
  TensorView take(std::initializer_list<std::int64_t> shape);
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return used_; }

 private:
  std::byte* memory_;
  DType dtype_;
  std::int64_t used_ = 0;
};

/// What forward keeps of one transformer block for its backward pass: 16 hidden-sized rows per token when the MLP is 4 wide,
///   ln_1 out C, qkv 3C, attention out C, middle C, ln_2 out C, c_fc out F, gelu out F, block out C,
/// and the statistics of both norms (4 per token) and of attention (heads per token). No dropout mask, no [T, T] matrix.
struct BlockActivations {
  TensorView norm1_mean, norm1_rstd, norm1_out, qkv, logsumexp, attention_out, middle, norm2_mean, norm2_rstd, norm2_out, fc_out,
      gelu_out, out;
};
[[nodiscard]] BlockActivations carve_block(Carver& carver, const GptConfig& model, MicroBatchShape shape);

/// Gradients inside one block between its backward_input and its backward_weight.
struct BlockGradients {
  TensorView mlp_out, fc_out, norm2_out, attention_projection, attention_out, qkv, norm1_out;
};
[[nodiscard]] BlockGradients carve_block_gradients(Carver& carver, const GptConfig& model, MicroBatchShape shape);

struct HeadActivations {
  TensorView mean, rstd, norm_out;
};
[[nodiscard]] HeadActivations carve_head(Carver& carver, const GptConfig& model, MicroBatchShape shape);

/// Logits exist for this many tokens at a time.
inline constexpr std::int64_t kLogitsChunkTokens = 256;
struct HeadWorkspace {
  TensorView logits;         ///< [min(tokens, kLogitsChunkTokens), vocabulary]
  TensorView norm_gradient;  ///< [tokens, hidden]
};
[[nodiscard]] HeadWorkspace carve_head_workspace(Carver& carver, const GptConfig& model, MicroBatchShape shape);

}  // namespace tandem

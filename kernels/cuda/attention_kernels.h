// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/rng.h"
#include "kernels/cuda/gpu.h"

/// What the kernels of attention take, and their launchers. All pointers are the device's.
namespace tandem::TANDEM_GPU {

/// Element c of head h of token t of row r is data[r * row_stride + t * token_stride + h * head_size + c].
struct AttentionOperand {
  void* data = nullptr;
  std::int64_t row_stride = 0, token_stride = 0;
};

/// The keys of Philox's ten rounds (core/rng.h), made on the host: as kernel arguments they cost no instructions.
struct MaskRounds {
  std::uint32_t keys[10][2] = {};
  MaskRounds() = default;
  explicit MaskRounds(std::uint64_t seed) {
    auto low = static_cast<std::uint32_t>(seed), high = static_cast<std::uint32_t>(seed >> 32);
    for (auto& pair : keys) {
      pair[0] = low;
      pair[1] = high;
      low += 0x9E3779B9U;
      high += 0xBB67AE85U;
    }
  }
};

/// Dropout of probabilities; element index as at AttentionShape.
struct AttentionDropout {
  DropoutKey key;
  MaskRounds rounds;
  std::uint32_t threshold = 0;            ///< an element is kept where its word is not below this
  double keep_scale = 1;                  ///< 1 / (1 - probability)
  const std::int64_t* row_ids = nullptr;  ///< [rows]; null: no dropout
  std::int64_t row_elements = 0, side = 0;
  int first_head = 0;
};

/// Queries whose smallest and largest document start are one entry of AttentionWork::tile_starts.
inline constexpr int kStartTile = 64;

/// One call of any attention: queries [query_begin, + queries) against keys [key_begin, + keys) of the same rows.
struct AttentionWork {
  int rows = 0, queries = 0, keys = 0, heads = 0, head_size = 0;
  int key_offset = 0;  ///< query_begin - key_begin: query i sees no key beyond i + key_offset
  int key_begin = 0;
  const std::int32_t* starts =
      nullptr;  ///< [rows, queries] document starts in keys of the segment (may be negative); null: all zero
  const std::int32_t* tile_starts = nullptr;  ///< [rows, queries in tiles of kStartTile, 2]: smallest and largest of `starts`
  AttentionDropout dropout;
  std::int64_t first_mask_element = 0;  ///< query_begin * side + key_begin
  double scale = 1;                     ///< 1 / sqrt(head_size)
  DType dtype = DType::f32;
  DType sums = DType::f32;  ///< of out (forward) or dquery, dkey, dvalue where they are added to
  bool accumulate = false;  ///< a segment: out and logsumexp are merged with what they hold, gradients are added to
  AttentionOperand query, key, value, out, dout, dquery, dkey, dvalue;
  void* logsumexp = nullptr;      ///< [rows, heads, queries]; fp32, or fp64 with fp64
  void* row_dots = nullptr;       ///< [rows, heads, queries], as logsumexp: sum of dout * out, what softmax's gradient subtracts
  void* query_lines = nullptr;    ///< the same, and more, for tensor cores: query_line_bytes()
  void* probabilities = nullptr;  ///< [rows, heads, queries, keys] of `dtype`; null unless they are kept
};

/// out and logsumexp. On tensor cores: 16 bits, head_size a multiple of 8 up to 128, tokens of all operands 16-byte aligned.
void launch_attention_forward(const AttentionWork& work, StreamHandle stream);
void launch_attention_forward_tensor_core(const AttentionWork& work, StreamHandle stream);

/// row_dots from out and dout.
void launch_attention_row_dots(const AttentionWork& work, StreamHandle stream);
/// dquery, dkey, dvalue; row_dots must be there. Probabilities are those kept, or recomputed from logsumexp.
void launch_attention_backward(const AttentionWork& work, StreamHandle stream);
/// The same on tensor cores, where no probabilities are kept: query_lines from out, dout and logsumexp; dquery; dkey and dvalue.
[[nodiscard]] std::int64_t query_line_bytes(const AttentionWork& work);
void launch_attention_query_lines(const AttentionWork& work, StreamHandle stream);
void launch_attention_query_gradient_tensor_core(const AttentionWork& work, StreamHandle stream);
void launch_attention_key_gradients_tensor_core(const AttentionWork& work, StreamHandle stream);

/// out and probabilities.
void launch_attention_materialized_forward(const AttentionWork& work, StreamHandle stream);
/// row_dots from the kept probabilities: sum over keys of P dP.
void launch_attention_materialized_row_dots(const AttentionWork& work, StreamHandle stream);

/// One token a row, see Kernels::attention_decode. Caches [rows, capacity, heads * head_size].
struct DecodeWork {
  int rows = 0, heads = 0, head_size = 0;
  std::int64_t length = 0, capacity = 0;
  double scale = 1;
  DType dtype = DType::f32;
  const void* qkv = nullptr;
  void *key_cache = nullptr, *value_cache = nullptr, *out = nullptr;
};
void launch_attention_decode(const DecodeWork& work, StreamHandle stream);

}  // namespace tandem::TANDEM_GPU

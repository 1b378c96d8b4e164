// SPDX-License-Identifier: Apache-2.0
// Attention: what the kernels are told of a call, and which of them do it.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/operand_checks.h"

namespace tandem::TANDEM_GPU {
namespace {

AttentionOperand operand_of(const StridedRows& rows) {
  if (!rows.memory) return {};
  auto* data =
      static_cast<std::byte*>(rows.memory.data()) + rows.offset * static_cast<std::int64_t>(size_bytes(rows.memory.dtype()));
  return {data, rows.row_stride, rows.token_stride};
}

/// A tensor [rows, queries, heads * head_size].
AttentionOperand packed(const AttentionSegment& s, const TensorView& tensor) {
  const std::int64_t width = s.heads * s.head_size;
  return operand_of({tensor, 0, s.queries * width, width});
}

AttentionWork work_of(const AttentionCall& call) {
  const AttentionSegment& s = call.segment;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2, kMostBlocks = 65535;
  TANDEM_CHECK(std::max({s.query_begin + s.queries, s.key_begin + s.keys, s.head_size}) <= kMost &&
                   std::max<std::int64_t>(s.rows, s.heads) <= kMostBlocks,
               fmt::format("{} rows of {} heads, {} queries and {} keys", s.rows, s.heads, s.queries, s.keys));
  AttentionWork work;
  work.rows = static_cast<int>(s.rows);
  work.queries = static_cast<int>(s.queries);
  work.keys = static_cast<int>(s.keys);
  work.heads = s.heads;
  work.head_size = static_cast<int>(s.head_size);
  work.key_offset = static_cast<int>(s.query_begin - s.key_begin);
  work.key_begin = static_cast<int>(s.key_begin);
  work.scale = 1.0 / std::sqrt(static_cast<double>(s.head_size));
  work.dtype = call.query.memory.dtype();
  work.accumulate = call.accumulate;
  work.sums = !call.accumulate ? work.dtype : (call.backward ? call.dquery.memory : call.out).dtype();
  work.query = operand_of(call.query);
  work.key = operand_of(call.key);
  work.value = operand_of(call.value);
  work.out = packed(s, call.out);
  work.dout = packed(s, call.dout);
  work.dquery = operand_of(call.dquery);
  work.dkey = operand_of(call.dkey);
  work.dvalue = operand_of(call.dvalue);
  work.logsumexp = call.logsumexp.data();
  work.probabilities = call.probabilities.data();
  return work;
}

/// Document starts as the kernels take them: in keys of the segment, rows without gaps, then the smallest and largest of each
/// tile of queries. Empty where all are zero.
std::vector<std::int32_t> starts_of(const AttentionSegment& s) {
  const std::int64_t tiles = (s.queries + kStartTile - 1) / kStartTile;
  std::vector<std::int32_t> starts;
  if (s.document_starts.empty()) return starts;
  starts.resize(static_cast<std::size_t>(s.rows * (s.queries + 2 * tiles)));
  std::int32_t* to = starts.data();
  std::int32_t* bounds = to + s.rows * s.queries;
  bool any = false;
  for (std::int64_t row = 0; row < s.rows; ++row) {
    const std::int32_t* from = s.document_starts.data() + row * s.document_stride;
    for (std::int64_t first = 0; first < s.queries; first += kStartTile) {
      const std::int64_t last = std::min(first + kStartTile, s.queries);
      const auto [least, most] = std::minmax_element(from + first, from + last);
      any = any || *most != 0;
      const auto key_begin = static_cast<std::int32_t>(s.key_begin);
      *bounds++ = *least - key_begin;
      *bounds++ = *most - key_begin;
      to = std::transform(from + first, from + last, to, [key_begin](std::int32_t start) { return start - key_begin; });
    }
  }
  if (!any) starts.clear();
  return starts;
}

/// Whether the tensor core kernels can do this: 16 bits, head_size a multiple of 8 up to 128, tokens 16-byte aligned.
bool fits_tensor_cores(const AttentionWork& work) {
  constexpr std::int64_t kChunk = 8;
  if (!is_16bit(work.dtype) || work.probabilities != nullptr || work.head_size % kChunk != 0 || work.head_size > 128)
    return false;
  const AttentionOperand* operands[] = {&work.query, &work.key,    &work.value, &work.out,
                                        &work.dout,  &work.dquery, &work.dkey,  &work.dvalue};
  return std::all_of(std::begin(operands), std::end(operands), [&](const AttentionOperand* operand) {
    return reinterpret_cast<std::uintptr_t>(operand->data) % 16 == 0 && operand->token_stride % kChunk == 0 &&
           (work.rows == 1 || operand->row_stride % kChunk == 0);
  });
}

}  // namespace

void CudaKernels::attention(const AttentionCall& call, const DropoutSpec& dropout) {
  check_attention(call, dropout);
  const AttentionSegment& s = call.segment;
  if (sees_nothing(s)) return;
  AttentionWork work = work_of(call);
  if (const std::vector<std::int32_t> starts = starts_of(s); !starts.empty()) {
    work.starts = upload(std::span<const std::int32_t>(starts));
    work.tile_starts = work.starts + s.rows * s.queries;
  }
  if (dropout.probability > 0) {
    work.dropout = {dropout.key,
                    MaskRounds(dropout.key.seed),
                    dropout_threshold(dropout.probability),
                    1.0 / (1.0 - dropout.probability),
                    upload(dropout.row_ids),
                    dropout.row_elements,
                    s.dropout_sequence,
                    s.first_head};
    work.first_mask_element = s.query_begin * s.dropout_sequence + s.key_begin;
  }
  const bool tensor_cores = fits_tensor_cores(work), kept = work.probabilities != nullptr;
  if (!call.backward) {
    if (kept) return launch_attention_materialized_forward(work, stream());
    return tensor_cores ? launch_attention_forward_tensor_core(work, stream()) : launch_attention_forward(work, stream());
  }
  if (tensor_cores) {
    const Temporary lines = temporary(query_line_bytes(work));
    work.query_lines = lines.data();
    launch_attention_query_lines(work, stream());
    launch_attention_key_gradients_tensor_core(work, stream());
    launch_attention_query_gradient_tensor_core(work, stream());
    return;
  }
  const Temporary dots = temporary(s.rows * s.heads * s.queries * static_cast<std::int64_t>(size_bytes(wide(work.dtype))));
  work.row_dots = dots.data();
  kept ? launch_attention_materialized_row_dots(work, stream()) : launch_attention_row_dots(work, stream());
  launch_attention_backward(work, stream());
}

void CudaKernels::attention_decode(int heads, std::int64_t head_size, std::int64_t length, TensorView qkv, TensorView key_cache,
                                   TensorView value_cache, TensorView out) {
  const std::int64_t width = heads * head_size, rows = rows_of(qkv, "qkv", 3 * width);
  if (rows == 0) return;
  const std::int64_t capacity = check_decode(heads, head_size, length, qkv, key_cache, value_cache, out);
  launch_attention_decode({.rows = static_cast<int>(rows),
                           .heads = heads,
                           .head_size = static_cast<int>(head_size),
                           .length = length,
                           .capacity = capacity,
                           .scale = 1.0 / std::sqrt(static_cast<double>(head_size)),
                           .dtype = qkv.dtype(),
                           .qkv = qkv.data(),
                           .key_cache = key_cache.data(),
                           .value_cache = value_cache.data(),
                           .out = out.data()},
                          stream());
}

}  // namespace tandem::TANDEM_GPU

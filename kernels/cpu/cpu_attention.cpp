// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "kernels/cpu/cpu_attention.h"

namespace tandem::cpu {
namespace {

/// The mask of one (row, head), where there is one.
template <class Real>
void set_mask(const AttentionCall& call, const DropoutSpec& dropout, const MaskKey& mask, std::int64_t row, std::int64_t index,
              AttentionHead<Real>& head) {
  if (dropout.probability <= 0) return;
  const AttentionSegment& s = call.segment;
  const std::int64_t side = s.dropout_sequence;
  head.mask = &mask;
  head.mask_first_element = static_cast<std::uint64_t>(dropout.row_ids[static_cast<std::size_t>(row)] * dropout.row_elements +
                                                       ((s.first_head + index) * side + s.query_begin) * side + s.key_begin);
  head.mask_row_elements = side;
  head.keep_scale = static_cast<Real>(1.0 / (1.0 - dropout.probability));
}

}  // namespace

template <class Real>
void CpuKernels::attention_head(const AttentionCall& call, std::int64_t item, const AttentionHead<Real>& head) {
  const VectorOps<Real>& loops = ops<Real>();
  if (!call.probabilities) {
    (call.backward ? loops.attention_backward : loops.attention_forward)(head);
    return;
  }
  const DType dtype = call.probabilities.dtype();
  void* probabilities = element(call.probabilities, item * head.queries * head.keys);
  if (call.backward) {
    materialized_backward<Real>(*parts_.tables, head, dtype, probabilities);
  } else {
    materialized_forward<Real>(*parts_.tables, head, dtype, probabilities);
  }
}

void CpuKernels::attention(const AttentionCall& call, const DropoutSpec& dropout) {
  check_attention(call, dropout);
  const AttentionSegment& s = call.segment;
  if (sees_nothing(s)) return;
  const MaskKey mask = mask_key(dropout);
  const bool widened = is_16bit(call.query.memory.dtype());
  with_arithmetic(call.query.memory, [&]<class Real>(Real) {
    const std::int64_t loop_elements =
        call.probabilities ? materialized_scratch(call) : ops<Real>().attention_scratch(s.keys, s.head_size);
    scratch_.reserve(static_cast<std::size_t>(loop_elements + (widened ? WidenedHead::elements(call) : 0)) * sizeof(Real));
    pool_.run(s.rows * s.heads, [&](std::int64_t item, int thread) {
      const std::int64_t row = item / s.heads, index = item % s.heads;
      const auto run = [&](AttentionHead<Real> head) {
        set_mask(call, dropout, mask, row, index, head);
        head.scratch = scratch_.of<Real>(thread);
        attention_head(call, item, head);
      };
      if constexpr (std::is_same_v<Real, float>) {
        if (widened) {
          const WidenedHead copies(*parts_.tables, call, row, index, scratch_.of<float>(thread) + loop_elements);
          run(copies.head());
          copies.store();
          return;
        }
      }
      run(head_in_place<Real>(call, row, index));
    });
  });
}

void CpuKernels::attention_decode(int heads, std::int64_t head_size, std::int64_t length, TensorView qkv, TensorView key_cache,
                                  TensorView value_cache, TensorView out) {
  const std::int64_t width = heads * head_size, rows = rows_of(qkv, "qkv", 3 * width);
  if (rows == 0) return;
  const std::int64_t capacity = check_decode(heads, head_size, length, qkv, key_cache, value_cache, out);
  if (is_16bit(qkv.dtype())) {
    decode_widened(heads, head_size, length, qkv, key_cache, value_cache, out);
    return;
  }
  with_real(qkv, [&]<class Real>(Real) {
    scratch_.reserve(static_cast<std::size_t>(capacity) * sizeof(Real));
    const auto scale = static_cast<Real>(1.0 / std::sqrt(static_cast<double>(head_size)));
    pool_.run(rows * heads, [&](std::int64_t item, int thread) {
      const std::int64_t row = item / heads, channel = item % heads * head_size;
      const Real* query = data_of<Real>(qkv) + row * 3 * width + channel;
      Real* keys = data_of<Real>(key_cache) + row * capacity * width + channel;
      Real* values = data_of<Real>(value_cache) + row * capacity * width + channel;
      std::copy_n(query + width, head_size, keys + length * width);
      std::copy_n(query + 2 * width, head_size, values + length * width);
      ops<Real>().attention_decode(query, keys, values, length + 1, width, head_size, scale, scratch_.of<Real>(thread),
                                   data_of<Real>(out) + row * width + channel);
    });
  });
}

/// attention_decode() on 16-bit tensors: each head's cache is widened as it is used.
void CpuKernels::decode_widened(int heads, std::int64_t head_size, std::int64_t length, const TensorView& qkv,
                                const TensorView& key_cache, const TensorView& value_cache, const TensorView& out) {
  const std::int64_t width = heads * head_size, rows = qkv.num_elements() / (3 * width), seen = length + 1;
  const std::int64_t capacity = key_cache.num_elements() / (rows * width);
  const DType dtype = qkv.dtype();
  const std::size_t head_bytes = static_cast<std::size_t>(head_size) * size_bytes(dtype);
  scratch_.reserve(Pieces::bytes(2, seen * head_size) + Pieces::bytes(1, seen) + Pieces::bytes(2, head_size));
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_size)));
  pool_.run(rows * heads, [&](std::int64_t item, int thread) {
    const std::int64_t row = item / heads, channel = item % heads * head_size;
    const std::int64_t query = row * 3 * width + channel, first = row * capacity * width + channel;
    Pieces copies = pieces(thread);
    const float* token = copies.read<float>(qkv, query, head_size);
    float *keys = copies.take(seen * head_size), *values = copies.take(seen * head_size);
    std::memcpy(element(key_cache, first + length * width), element(qkv, query + width), head_bytes);
    std::memcpy(element(value_cache, first + length * width), element(qkv, query + 2 * width), head_bytes);
    for (std::int64_t t = 0; t < seen; ++t) {
      widen(*parts_.tables, element(key_cache, first + t * width), dtype, keys + t * head_size, head_size);
      widen(*parts_.tables, element(value_cache, first + t * width), dtype, values + t * head_size, head_size);
    }
    float* weights = copies.take(seen);
    float* attended = copies.write<float>(out, row * width + channel, head_size);
    ops<float>().attention_decode(token, keys, values, seen, head_size, head_size, scale, weights, attended);
    copies.store();
  });
}

}  // namespace tandem::cpu

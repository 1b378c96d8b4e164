// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_call.h"

#include <cstdint>
#include <span>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/operand_checks.h"

namespace tandem {
namespace {

void check_segment(const AttentionSegment& s, const DropoutSpec& dropout) {
  TANDEM_CHECK(s.rows >= 0 && s.queries >= 0 && s.keys >= 0 && s.heads > 0 && s.head_size > 0);
  TANDEM_CHECK(s.query_begin >= 0 && s.key_begin >= 0);
  const std::span<const std::int32_t> starts = s.document_starts;
  TANDEM_CHECK(s.document_stride >= 0);
  TANDEM_CHECK(
      starts.empty() || static_cast<std::int64_t>(starts.size()) >= (s.rows - 1) * s.document_stride + s.queries,
      fmt::format("{} document starts for {} rows of {} queries, {} apart", starts.size(), s.rows, s.queries, s.document_stride));
  for (std::int64_t row = 0; row < s.rows && !starts.empty(); ++row) {
    for (std::int64_t i = 0; i < s.queries; ++i) {
      const std::int32_t start = starts[static_cast<std::size_t>(row * s.document_stride + i)];
      TANDEM_CHECK(start >= 0 && start <= s.query_begin + i,
                   fmt::format("document start {} of position {}", start, s.query_begin + i));
    }
  }
  TANDEM_CHECK(s.first_head >= 0 && (s.total_heads == 0 || s.first_head + s.heads <= s.total_heads),
               fmt::format("heads [{}, {}) of {}", s.first_head, s.first_head + s.heads, s.total_heads));
  if (dropout.probability > 0) {
    const std::int64_t side = s.dropout_sequence, heads = s.total_heads == 0 ? s.heads : s.total_heads;
    TANDEM_CHECK(static_cast<std::int64_t>(dropout.row_ids.size()) == s.rows);
    TANDEM_CHECK(side >= s.query_begin + s.queries && side >= s.key_begin + s.keys,
                 "dropout_sequence is the model's full sequence");
    TANDEM_CHECK(dropout.row_elements == heads * side * side,
                 fmt::format("{} mask elements per row, expected {} heads of {} x {}", dropout.row_elements, heads, side, side));
  }
}

void check_strided(const AttentionSegment& s, const StridedRows& operand, std::string_view name, std::int64_t tokens,
                   DType dtype) {
  const std::int64_t last =
      operand.offset + (s.rows - 1) * operand.row_stride + (tokens - 1) * operand.token_stride + s.heads * s.head_size;
  TANDEM_CHECK(operand.memory.dtype() == dtype && operand.offset >= 0 && operand.row_stride >= 0 && operand.token_stride >= 0 &&
                   last <= operand.memory.num_elements(),
               fmt::format("{} reaches element {} of {} of {}", name, last, to_string(operand.memory.shape()),
                           to_string(Shape{s.rows, tokens, s.heads, s.head_size})));
}

/// What a segment adds to may be wider than its operands.
DType dtype_of_sums(const AttentionCall& call, const TensorView& sums, std::string_view name) {
  const DType dtype = call.query.memory.dtype();
  if (!call.accumulate) return dtype;
  expect_accumulator(sums, name, dtype);
  return sums.dtype();
}

/// Part 0, 1 or 2 of qkv.
StridedRows third(const AttentionShape& shape, TensorView qkv, std::int64_t part) {
  const std::int64_t width = shape.heads * shape.head_size;
  return {qkv, part * width, shape.sequence * 3 * width, 3 * width};
}

}  // namespace

void check_attention(const AttentionCall& call, const DropoutSpec& dropout) {
  const AttentionSegment& s = call.segment;
  const DType dtype = call.query.memory.dtype();
  const std::int64_t width = s.heads * s.head_size;
  check_segment(s, dropout);
  if (call.probabilities) {
    expect(call.probabilities, "probabilities", dtype, {s.rows, s.heads, s.queries, s.keys});
  } else {
    expect(call.logsumexp, "logsumexp", wide(dtype), {s.rows, s.heads, s.queries});
  }
  if (!call.probabilities || !call.backward) {
    expect(call.out, "out", dtype_of_sums(call, call.out, "out"), {s.rows * s.queries, width});
  }
  if (s.rows == 0 || s.queries == 0 || s.keys == 0) return;
  check_strided(s, call.query, "query", s.queries, dtype);
  check_strided(s, call.key, "key", s.keys, dtype);
  check_strided(s, call.value, "value", s.keys, dtype);
  if (!call.backward) return;
  const DType sums = dtype_of_sums(call, call.dquery.memory, "dquery");
  expect(call.dout, "dout", dtype, {s.rows * s.queries, width});
  check_strided(s, call.dquery, "dquery", s.queries, sums);
  check_strided(s, call.dkey, "dkey", s.keys, sums);
  check_strided(s, call.dvalue, "dvalue", s.keys, sums);
}

bool sees_nothing(const AttentionSegment& s) {
  return s.rows == 0 || s.queries == 0 || s.keys == 0 || s.key_begin >= s.query_begin + s.queries;
}

AttentionCall whole_call(const AttentionShape& shape, const TensorView& qkv) {
  const std::span<const std::int32_t> starts = shape.document_starts;
  TANDEM_CHECK(starts.empty() || static_cast<std::int64_t>(starts.size()) == shape.rows * shape.sequence);
  expect(qkv, "qkv", qkv.dtype(), {shape.rows * shape.sequence, 3 * shape.heads * shape.head_size});
  AttentionCall call;
  call.segment = {.rows = shape.rows,
                  .queries = shape.sequence,
                  .keys = shape.sequence,
                  .heads = shape.heads,
                  .head_size = shape.head_size,
                  .document_starts = starts,
                  .document_stride = shape.sequence,
                  .dropout_sequence = shape.dropout_sequence,
                  .total_heads = shape.total_heads,
                  .first_head = shape.first_head};
  call.query = third(shape, qkv, 0);
  call.key = third(shape, qkv, 1);
  call.value = third(shape, qkv, 2);
  return call;
}

AttentionCall whole_backward_call(const AttentionShape& shape, const TensorView& dout, const TensorView& qkv,
                                  const TensorView& dqkv) {
  AttentionCall call = whole_call(shape, qkv);
  expect(dqkv, "dqkv", qkv.dtype(), {shape.rows * shape.sequence, 3 * shape.heads * shape.head_size});
  call.backward = true;
  call.dout = dout;
  call.dquery = third(shape, dqkv, 0);
  call.dkey = third(shape, dqkv, 1);
  call.dvalue = third(shape, dqkv, 2);
  return call;
}

AttentionCall segment_call(const AttentionSegment& segment, const StridedRows& query, const StridedRows& key,
                           const StridedRows& value, const TensorView& out, const TensorView& logsumexp) {
  AttentionCall call;
  call.segment = segment;
  call.query = query;
  call.key = key;
  call.value = value;
  call.out = out;
  call.logsumexp = logsumexp;
  call.accumulate = true;
  return call;
}

std::int64_t check_decode(int heads, std::int64_t head_size, std::int64_t length, const TensorView& qkv,
                          const TensorView& key_cache, const TensorView& value_cache, const TensorView& out) {
  const std::int64_t width = heads * head_size, rows = rows_of(qkv, "qkv", 3 * width);
  const std::int64_t capacity = key_cache.num_elements() / (rows * width);
  expect(key_cache, "key_cache", qkv.dtype(), {rows, capacity, width});
  expect(value_cache, "value_cache", qkv.dtype(), {rows, capacity, width});
  expect(out, "out", qkv.dtype(), {rows, width});
  TANDEM_CHECK(length >= 0 && length < capacity, fmt::format("{} entries set of a cache of {}", length, capacity));
  return capacity;
}

}  // namespace tandem

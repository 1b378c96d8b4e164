// SPDX-License-Identifier: Apache-2.0
// What both kinds of attention share: the operands of one head.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {

/// The shape and the strides of one (row, head) of the call. Pointers, the mask and the scratch are left to the caller.
template <class Real>
[[nodiscard]] AttentionHead<Real> head_shape(const AttentionCall& call, std::int64_t row) {
  const AttentionSegment& s = call.segment;
  AttentionHead<Real> head = {};
  head.queries = s.queries;
  head.keys = s.keys;
  head.query_begin = s.query_begin;
  head.key_begin = s.key_begin;
  head.head_size = s.head_size;
  head.document_starts = s.document_starts.empty() ? nullptr : s.document_starts.data() + row * s.document_stride;
  head.accumulate = call.accumulate;
  head.scale = static_cast<Real>(1.0 / std::sqrt(static_cast<double>(s.head_size)));
  return head;
}

/// The first element of one (row, head) of a strided operand.
[[nodiscard]] inline std::int64_t first_element(const StridedRows& operand, std::int64_t row, std::int64_t channel) {
  return operand.offset + row * operand.row_stride + channel;
}

/// The operands where they lie, in tensors of Real.
template <class Real>
[[nodiscard]] AttentionHead<Real> head_in_place(const AttentionCall& call, std::int64_t row, std::int64_t index) {
  const AttentionSegment& s = call.segment;
  const std::int64_t width = s.heads * s.head_size, channel = index * s.head_size, first = row * s.queries * width + channel;
  const auto at = [&](const StridedRows& operand) {
    return data_of<Real>(operand.memory) + first_element(operand, row, channel);
  };
  AttentionHead<Real> head = head_shape<Real>(call, row);
  head.q_stride = call.query.token_stride;
  head.k_stride = call.key.token_stride;
  head.v_stride = call.value.token_stride;
  head.out_stride = width;
  head.q = at(call.query);
  head.k = at(call.key);
  head.v = at(call.value);
  if (call.out) head.out = data_of<Real>(call.out) + first;
  if (call.logsumexp) head.logsumexp = data_of<Real>(call.logsumexp) + (row * s.heads + index) * s.queries;
  if (!call.backward) return head;
  head.dout = data_of<Real>(call.dout) + first;
  head.dq = at(call.dquery);
  head.dk = at(call.dkey);
  head.dv = at(call.dvalue);
  head.dq_stride = call.dquery.token_stride;
  head.dk_stride = call.dkey.token_stride;
  head.dv_stride = call.dvalue.token_stride;
  return head;
}

/// The operands of one head of a call on 16-bit tensors, copied to contiguous fp32: the loops run on the copies, store() rounds
/// what they wrote.
class WidenedHead {
 public:
  /// Elements of memory that the copies take.
  [[nodiscard]] static std::int64_t elements(const AttentionCall& call);
  WidenedHead(const VectorTables& tables, const AttentionCall& call, std::int64_t row, std::int64_t index, float* memory);
  [[nodiscard]] const AttentionHead<float>& head() const noexcept { return head_; }
  void store() const;

 private:
  [[nodiscard]] StridedRows packed(const TensorView& tensor) const;
  [[nodiscard]] float* take(std::int64_t tokens);
  [[nodiscard]] float* read(const StridedRows& operand, std::int64_t tokens);
  void write(const float* from, const StridedRows& operand, std::int64_t tokens) const;

  const VectorTables& tables_;
  const AttentionCall& call_;
  std::int64_t row_, channel_;
  float* unused_;
  AttentionHead<float> head_;
};

/// Elements of scratch, and the work, of one head of materialized attention. `probabilities`: [queries, keys] of the dtype.
[[nodiscard]] std::int64_t materialized_scratch(const AttentionCall& call);
template <class Real>
void materialized_forward(const VectorTables& tables, const AttentionHead<Real>& head, DType dtype, void* probabilities);
template <class Real>
void materialized_backward(const VectorTables& tables, const AttentionHead<Real>& head, DType dtype, const void* probabilities);

}  // namespace tandem::cpu

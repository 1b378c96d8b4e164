// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_attention.h"

namespace tandem::cpu {

std::int64_t WidenedHead::elements(const AttentionCall& call) {
  const AttentionSegment& s = call.segment;
  const std::int64_t of_queries = call.backward ? 4 : 2, of_keys = call.backward ? 4 : 2;  // q, out, dout, dq; k, v, dk, dv
  return (of_queries * s.queries + of_keys * s.keys) * s.head_size;
}

WidenedHead::WidenedHead(const VectorTables& tables, const AttentionCall& call, std::int64_t row, std::int64_t index,
                         float* memory)
    : tables_(tables),
      call_(call),
      row_(row),
      channel_(index * call.segment.head_size),
      unused_(memory),
      head_(head_shape<float>(call, row)) {
  const AttentionSegment& s = call.segment;
  for (std::int64_t* stride : {&head_.q_stride, &head_.k_stride, &head_.v_stride, &head_.out_stride, &head_.dq_stride,
                               &head_.dk_stride, &head_.dv_stride}) {
    *stride = s.head_size;
  }
  head_.q = read(call.query, s.queries);
  head_.k = read(call.key, s.keys);
  head_.v = read(call.value, s.keys);
  if (call.logsumexp) head_.logsumexp = data_of<float>(call.logsumexp) + (row * s.heads + index) * s.queries;
  if (call.out) head_.out = call.backward || call.accumulate ? read(packed(call.out), s.queries) : take(s.queries);
  if (!call.backward) return;
  head_.dout = read(packed(call.dout), s.queries);
  head_.dq = call.accumulate ? read(call.dquery, s.queries) : take(s.queries);
  head_.dk = call.accumulate ? read(call.dkey, s.keys) : take(s.keys);
  head_.dv = call.accumulate ? read(call.dvalue, s.keys) : take(s.keys);
}

void WidenedHead::store() const {
  const AttentionSegment& s = call_.segment;
  if (call_.backward) {
    write(head_.dq, call_.dquery, s.queries);
    write(head_.dk, call_.dkey, s.keys);
    write(head_.dv, call_.dvalue, s.keys);
  } else {
    write(head_.out, packed(call_.out), s.queries);
  }
}

/// A tensor [rows, queries, heads * head_size].
StridedRows WidenedHead::packed(const TensorView& tensor) const {
  const AttentionSegment& s = call_.segment;
  const std::int64_t width = s.heads * s.head_size;
  return {tensor, 0, s.queries * width, width};
}

float* WidenedHead::take(std::int64_t tokens) {
  float* taken = unused_;
  unused_ += tokens * call_.segment.head_size;
  return taken;
}

float* WidenedHead::read(const StridedRows& operand, std::int64_t tokens) {
  float* copy = take(tokens);
  const std::int64_t size = call_.segment.head_size, first = first_element(operand, row_, channel_);
  for (std::int64_t t = 0; t < tokens; ++t) {
    widen(tables_, element(operand.memory, first + t * operand.token_stride), operand.memory.dtype(), copy + t * size, size);
  }
  return copy;
}

void WidenedHead::write(const float* from, const StridedRows& operand, std::int64_t tokens) const {
  const std::int64_t size = call_.segment.head_size, first = first_element(operand, row_, channel_);
  for (std::int64_t t = 0; t < tokens; ++t) {
    narrow(tables_, from + t * size, operand.memory.dtype(), element(operand.memory, first + t * operand.token_stride), size);
  }
}

}  // namespace tandem::cpu

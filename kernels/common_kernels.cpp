// SPDX-License-Identifier: Apache-2.0
#include "kernels/common_kernels.h"

#include "kernels/operand_checks.h"

namespace tandem {

void CommonKernels::linear_forward(TensorView x, TensorView weight, TensorView bias, TensorView y) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(x, "x", in);
  const bool wide_result = is_16bit(weight.dtype()) && y.dtype() == DType::f32;
  expect(x, "x", weight.dtype(), {tokens, in});
  expect(y, "y", wide_result ? DType::f32 : weight.dtype(), {tokens, out});
  if (bias) expect(bias, "bias", weight.dtype(), {out});
  if (tokens == 0) return;
  multiply({.shape = {.m = tokens, .n = out, .k = in, .lda = in, .ldb = out, .ldc = out},
            .a = x,
            .b = weight,
            .c = y,
            .bias = bias,
            .gelu = {}});
}

void CommonKernels::linear_gelu_forward(TensorView x, TensorView weight, TensorView bias, TensorView y_pre, TensorView y) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(x, "x", in);
  expect(x, "x", weight.dtype(), {tokens, in});
  expect(bias, "bias", weight.dtype(), {out});
  expect(y_pre, "y_pre", weight.dtype(), {tokens, out});
  expect(y, "y", weight.dtype(), {tokens, out});
  if (tokens == 0) return;
  const bool erf = pitfalls_.on(Pitfall::gelu_with_erf);
  multiply({.shape = {.m = tokens, .n = out, .k = in, .lda = in, .ldb = out, .ldc = out},
            .a = x,
            .b = weight,
            .c = y_pre,
            .bias = bias,
            .gelu = erf ? TensorView() : y});
  if (erf) gelu_forward(y_pre, y);
}

void CommonKernels::linear_backward_input(TensorView dy, TensorView weight, TensorView dx) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(dy, "dy", out);
  expect(dy, "dy", weight.dtype(), {tokens, out});
  expect(dx, "dx", weight.dtype(), {tokens, in});
  if (tokens == 0) return;
  multiply({.shape = {.m = tokens, .n = in, .k = out, .lda = out, .ldb = out, .ldc = in, .transpose_b = true},
            .a = dy,
            .b = weight,
            .c = dx,
            .bias = {},
            .gelu = {}});
}

void CommonKernels::linear_backward_weight(TensorView x, TensorView dy, TensorView dweight, TensorView dbias) {
  const std::int64_t in = dweight.dim(0), out = dweight.dim(1), tokens = rows_of(x, "x", in);
  if (tokens == 0) return;
  expect(x, "x", x.dtype(), {tokens, in});
  expect(dy, "dy", x.dtype(), {tokens, out});
  expect_accumulator(dweight, "dweight", x.dtype());
  if (dbias) expect(dbias, "dbias", dweight.dtype(), {out});
  multiply({.shape = {.m = in, .n = out, .k = tokens, .lda = in, .ldb = out, .ldc = out, .transpose_a = true, .accumulate = true},
            .a = x,
            .b = dy,
            .c = dweight,
            .bias = {},
            .gelu = {}});
  if (dbias) bias_backward(dy, dbias);
}

void CommonKernels::head_forward(TensorView x, TensorView embedding, TensorView logits) {
  const std::int64_t vocabulary = embedding.dim(0), hidden = embedding.dim(1), tokens = rows_of(x, "x", hidden);
  expect(x, "x", embedding.dtype(), {tokens, hidden});
  expect(logits, "logits", embedding.dtype(), {tokens, vocabulary});
  if (tokens == 0) return;
  multiply(
      {.shape = {.m = tokens, .n = vocabulary, .k = hidden, .lda = hidden, .ldb = hidden, .ldc = vocabulary, .transpose_b = true},
       .a = x,
       .b = embedding,
       .c = logits,
       .bias = {},
       .gelu = {}});
}

void CommonKernels::head_backward_input(TensorView dlogits, TensorView embedding, TensorView dx) {
  const std::int64_t vocabulary = embedding.dim(0), hidden = embedding.dim(1), tokens = rows_of(dlogits, "dlogits", vocabulary);
  expect(dlogits, "dlogits", embedding.dtype(), {tokens, vocabulary});
  expect(dx, "dx", embedding.dtype(), {tokens, hidden});
  if (tokens == 0) return;
  multiply({.shape = {.m = tokens, .n = hidden, .k = vocabulary, .lda = vocabulary, .ldb = hidden, .ldc = hidden},
            .a = dlogits,
            .b = embedding,
            .c = dx,
            .bias = {},
            .gelu = {}});
}

void CommonKernels::head_backward_weight(TensorView x, TensorView dlogits, TensorView dembedding) {
  const std::int64_t vocabulary = dembedding.dim(0), hidden = dembedding.dim(1), tokens = rows_of(x, "x", hidden);
  if (tokens == 0) return;
  expect(x, "x", x.dtype(), {tokens, hidden});
  expect(dlogits, "dlogits", x.dtype(), {tokens, vocabulary});
  expect_accumulator(dembedding, "dembedding", x.dtype());
  multiply({.shape = {.m = vocabulary,
                      .n = hidden,
                      .k = tokens,
                      .lda = vocabulary,
                      .ldb = hidden,
                      .ldc = hidden,
                      .transpose_a = true,
                      .accumulate = true},
            .a = dlogits,
            .b = x,
            .c = dembedding,
            .bias = {},
            .gelu = {}});
}

void CommonKernels::attention_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv, TensorView out,
                                      TensorView logsumexp) {
  AttentionCall call = whole_call(shape, qkv);
  call.out = out;
  call.logsumexp = logsumexp;
  attention(call, dropout);
}

void CommonKernels::attention_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout, TensorView qkv,
                                       TensorView out, TensorView logsumexp, TensorView dqkv) {
  AttentionCall call = whole_backward_call(shape, dout, qkv, dqkv);
  call.out = out;
  call.logsumexp = logsumexp;
  attention(call, dropout);
}

void CommonKernels::attention_materialized_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv,
                                                   TensorView out, TensorView probabilities) {
  AttentionCall call = whole_call(shape, qkv);
  call.out = out;
  call.probabilities = probabilities;
  attention(call, dropout);
}

void CommonKernels::attention_materialized_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout,
                                                    TensorView qkv, TensorView probabilities, TensorView dqkv) {
  AttentionCall call = whole_backward_call(shape, dout, qkv, dqkv);
  call.probabilities = probabilities;
  attention(call, dropout);
}

void CommonKernels::attention_segment_forward(const AttentionSegment& segment, const DropoutSpec& dropout,
                                              const StridedRows& query, const StridedRows& key, const StridedRows& value,
                                              TensorView out, TensorView logsumexp) {
  attention(segment_call(segment, query, key, value, out, logsumexp), dropout);
}

void CommonKernels::attention_segment_backward(const AttentionSegment& segment, const DropoutSpec& dropout, TensorView dout,
                                               const StridedRows& query, const StridedRows& key, const StridedRows& value,
                                               TensorView out, TensorView logsumexp, const StridedRows& dquery,
                                               const StridedRows& dkey, const StridedRows& dvalue) {
  AttentionCall call = segment_call(segment, query, key, value, out, logsumexp);
  call.backward = true;
  call.dout = dout;
  call.dquery = dquery;
  call.dkey = dkey;
  call.dvalue = dvalue;
  attention(call, dropout);
}

}  // namespace tandem

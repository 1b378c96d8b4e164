// SPDX-License-Identifier: Apache-2.0
// Linear layers and the head.
#include <fmt/format.h>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/cpu_products.h"

namespace tandem::cpu {

template <class Real>
void CpuKernels::multiply_plain(const ProductCall& call) {
  const MatrixProduct& product = call.shape;
  const BlockGrid grid = block_grid(product.m, product.n, product.k);
  pool_.run(grid.down * grid.across, [&](std::int64_t index, int) {
    const Block block = block_at(grid, product.m, product.n, index);
    const std::int64_t first = block.row * product.ldc + block.column;
    Real* c = data_of<Real>(call.c) + first;
    multiply_block(library<Real>(), product, block, data_of<const Real>(call.a), data_of<const Real>(call.b), c);
    if (call.gelu) {
      ops<Real>().bias_gelu(c, data_of<Real>(call.gelu) + first, product.ldc, data_of<Real>(call.bias) + block.column, block.rows,
                            block.columns);
    } else if (call.bias) {
      ops<Real>().bias_add(c, product.ldc, data_of<Real>(call.bias) + block.column, block.rows, block.columns);
    }
  });
}

void CpuKernels::multiply(const ProductCall& call) {
  const DType operands = call.a.dtype();
  TANDEM_CHECK(call.b.dtype() == operands, fmt::format("a product of {} and {}", name(operands), name(call.b.dtype())));
  const bool autocast = operands == DType::f32 && parts_.products != DType::f32;
  if (!autocast && !is_16bit(operands)) {
    with_real(call.a, [&]<class Real>(Real) { multiply_plain<Real>(call); });
    return;
  }
  const DType rounded = autocast ? parts_.products : operands;
  const NarrowProduct product(*parts_.tables, library<float>(), call, rounded, rounded == DType::bf16 && parts_.bf16_products);
  scratch_.reserve(product.scratch_bytes());
  pool_.run(product.grid().down * product.grid().across,
            [&](std::int64_t index, int thread) { product.compute(index, scratch_.of<std::byte>(thread)); });
}

void CpuKernels::linear_forward(TensorView x, TensorView weight, TensorView bias, TensorView y) {
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

void CpuKernels::linear_gelu_forward(TensorView x, TensorView weight, TensorView bias, TensorView y_pre, TensorView y) {
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

void CpuKernels::linear_backward_input(TensorView dy, TensorView weight, TensorView dx) {
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

void CpuKernels::linear_backward_weight(TensorView x, TensorView dy, TensorView dweight, TensorView dbias) {
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

void CpuKernels::head_forward(TensorView x, TensorView embedding, TensorView logits) {
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

void CpuKernels::head_backward_input(TensorView dlogits, TensorView embedding, TensorView dx) {
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

void CpuKernels::head_backward_weight(TensorView x, TensorView dlogits, TensorView dembedding) {
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

}  // namespace tandem::cpu

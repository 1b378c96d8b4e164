// SPDX-License-Identifier: Apache-2.0
// Matrix products, layer norm and the elementwise operations around them.
#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 14;
constexpr std::int64_t kColumnGrain = 128;

/// x Phi(x), the GELU with the error function: Pitfall::gelu_with_erf.
template <class Real>
void erf_gelu(const Real* x, Real* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(x[i]);
    y[i] = static_cast<Real>(0.5 * value * (1.0 + std::erf(value / std::numbers::sqrt2)));
  }
}

template <class Real>
void erf_gelu_backward(const Real* dy, const Real* x, Real* dx, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(x[i]);
    const double density = std::exp(-0.5 * value * value) / std::sqrt(2.0 * std::numbers::pi);
    dx[i] =
        static_cast<Real>(static_cast<double>(dy[i]) * (0.5 * (1.0 + std::erf(value / std::numbers::sqrt2)) + value * density));
  }
}

std::int64_t rows_per_piece(std::int64_t columns) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, columns));
}

}  // namespace

template <class Real, class After>
void CpuKernels::multiply(const MatrixProduct& product, const Real* a, const Real* b, Real* c, After after) {
  const BlockGrid grid = block_grid(product.m, product.n, product.k);
  pool_.run(grid.down * grid.across, [&](std::int64_t index, int) {
    const Block block = block_at(grid, product.m, product.n, index);
    multiply_block(library<Real>(), product, block, a, b, c);
    after(block);
  });
}

template <class Real>
void CpuKernels::sum_columns(const Real* x, std::int64_t rows, std::int64_t columns, Real* sum) {
  pool_.run_pieces(columns, kColumnGrain,
                   [&](std::int64_t begin, std::int64_t end, int) { ops<Real>().column_sum(x, rows, columns, begin, end, sum); });
}

void CpuKernels::linear_forward(TensorView x, TensorView weight, TensorView bias, TensorView y) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(x, "x", in);
  expect(x, "x", weight.dtype(), {tokens, in});
  expect(y, "y", weight.dtype(), {tokens, out});
  if (bias) expect(bias, "bias", weight.dtype(), {out});
  if (tokens == 0) return;
  with_real(weight, [&]<class Real>(Real) {
    Real* result = data_of<Real>(y);
    multiply({.m = tokens, .n = out, .k = in, .lda = in, .ldb = out, .ldc = out}, data_of<Real>(x), data_of<Real>(weight), result,
             [&](const Block& block) {
               if (!bias) return;
               ops<Real>().bias_add(result + block.row * out + block.column, out, data_of<Real>(bias) + block.column, block.rows,
                                    block.columns);
             });
  });
}

void CpuKernels::linear_gelu_forward(TensorView x, TensorView weight, TensorView bias, TensorView y_pre, TensorView y) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(x, "x", in);
  expect(x, "x", weight.dtype(), {tokens, in});
  expect(bias, "bias", weight.dtype(), {out});
  expect(y_pre, "y_pre", weight.dtype(), {tokens, out});
  expect(y, "y", weight.dtype(), {tokens, out});
  if (tokens == 0) return;
  if (pitfalls_.on(Pitfall::gelu_with_erf)) {
    linear_forward(x, weight, bias, y_pre);
    gelu_forward(y_pre, y);
    return;
  }
  with_real(weight, [&]<class Real>(Real) {
    Real* before = data_of<Real>(y_pre);
    multiply({.m = tokens, .n = out, .k = in, .lda = in, .ldb = out, .ldc = out}, data_of<Real>(x), data_of<Real>(weight), before,
             [&](const Block& block) {
               const std::int64_t first = block.row * out + block.column;
               ops<Real>().bias_gelu(before + first, data_of<Real>(y) + first, out, data_of<Real>(bias) + block.column,
                                     block.rows, block.columns);
             });
  });
}

void CpuKernels::linear_backward_input(TensorView dy, TensorView weight, TensorView dx) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(dy, "dy", out);
  expect(dy, "dy", weight.dtype(), {tokens, out});
  expect(dx, "dx", weight.dtype(), {tokens, in});
  if (tokens == 0) return;
  with_real(weight, [&]<class Real>(Real) {
    multiply({.m = tokens, .n = in, .k = out, .lda = out, .ldb = out, .ldc = in, .transpose_b = true}, data_of<Real>(dy),
             data_of<Real>(weight), data_of<Real>(dx));
  });
}

void CpuKernels::linear_backward_weight(TensorView x, TensorView dy, TensorView dweight, TensorView dbias) {
  const std::int64_t in = dweight.dim(0), out = dweight.dim(1), tokens = rows_of(x, "x", in);
  expect(x, "x", dweight.dtype(), {tokens, in});
  expect(dy, "dy", dweight.dtype(), {tokens, out});
  if (dbias) expect(dbias, "dbias", dweight.dtype(), {out});
  if (tokens == 0) return;
  with_real(dweight, [&]<class Real>(Real) {
    multiply({.m = in, .n = out, .k = tokens, .lda = in, .ldb = out, .ldc = out, .transpose_a = true, .accumulate = true},
             data_of<Real>(x), data_of<Real>(dy), data_of<Real>(dweight));
    if (dbias) sum_columns(data_of<Real>(dy), tokens, out, data_of<Real>(dbias));
  });
}

void CpuKernels::head_forward(TensorView x, TensorView embedding, TensorView logits) {
  const std::int64_t vocabulary = embedding.dim(0), hidden = embedding.dim(1), tokens = rows_of(x, "x", hidden);
  expect(x, "x", embedding.dtype(), {tokens, hidden});
  expect(logits, "logits", embedding.dtype(), {tokens, vocabulary});
  if (tokens == 0) return;
  with_real(embedding, [&]<class Real>(Real) {
    multiply({.m = tokens, .n = vocabulary, .k = hidden, .lda = hidden, .ldb = hidden, .ldc = vocabulary, .transpose_b = true},
             data_of<Real>(x), data_of<Real>(embedding), data_of<Real>(logits));
  });
}

void CpuKernels::head_backward_input(TensorView dlogits, TensorView embedding, TensorView dx) {
  const std::int64_t vocabulary = embedding.dim(0), hidden = embedding.dim(1), tokens = rows_of(dlogits, "dlogits", vocabulary);
  expect(dlogits, "dlogits", embedding.dtype(), {tokens, vocabulary});
  expect(dx, "dx", embedding.dtype(), {tokens, hidden});
  if (tokens == 0) return;
  with_real(embedding, [&]<class Real>(Real) {
    multiply({.m = tokens, .n = hidden, .k = vocabulary, .lda = vocabulary, .ldb = hidden, .ldc = hidden}, data_of<Real>(dlogits),
             data_of<Real>(embedding), data_of<Real>(dx));
  });
}

void CpuKernels::head_backward_weight(TensorView x, TensorView dlogits, TensorView dembedding) {
  const std::int64_t vocabulary = dembedding.dim(0), hidden = dembedding.dim(1), tokens = rows_of(x, "x", hidden);
  expect(x, "x", dembedding.dtype(), {tokens, hidden});
  expect(dlogits, "dlogits", dembedding.dtype(), {tokens, vocabulary});
  if (tokens == 0) return;
  with_real(dembedding, [&]<class Real>(Real) {
    multiply({.m = vocabulary,
              .n = hidden,
              .k = tokens,
              .lda = vocabulary,
              .ldb = hidden,
              .ldc = hidden,
              .transpose_a = true,
              .accumulate = true},
             data_of<Real>(dlogits), data_of<Real>(x), data_of<Real>(dembedding));
  });
}

void CpuKernels::layer_norm_forward(TensorView x, TensorView weight, TensorView bias, double epsilon, TensorView y,
                                    TensorView mean, TensorView rstd) {
  const std::int64_t hidden = weight.num_elements(), tokens = rows_of(x, "x", hidden);
  const DType dtype = weight.dtype();
  expect(x, "x", dtype, {tokens, hidden});
  expect(bias, "bias", dtype, {hidden});
  expect(y, "y", dtype, {tokens, hidden});
  TANDEM_CHECK(mean.dtype() == dtype && mean.num_elements() == tokens && rstd.dtype() == dtype && rstd.num_elements() == tokens);
  // Another framework's default: shows only where the variance of a row is small.
  const double used_epsilon = pitfalls_.on(Pitfall::layer_norm_small_epsilon) ? 1e-6 : epsilon;
  with_real(weight, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, rows_per_piece(hidden), [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().layer_norm_forward(data_of<Real>(x) + begin * hidden, data_of<Real>(weight), data_of<Real>(bias),
                                     static_cast<Real>(used_epsilon), end - begin, hidden, data_of<Real>(y) + begin * hidden,
                                     data_of<Real>(mean) + begin, data_of<Real>(rstd) + begin);
    });
  });
}

void CpuKernels::layer_norm_backward_input(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                           TensorView dresidual, TensorView dx) {
  const std::int64_t hidden = weight.num_elements(), tokens = rows_of(x, "x", hidden);
  const DType dtype = weight.dtype();
  expect(x, "x", dtype, {tokens, hidden});
  expect(dy, "dy", dtype, {tokens, hidden});
  expect(dx, "dx", dtype, {tokens, hidden});
  if (dresidual) expect(dresidual, "dresidual", dtype, {tokens, hidden});
  TANDEM_CHECK(mean.dtype() == dtype && mean.num_elements() == tokens && rstd.dtype() == dtype && rstd.num_elements() == tokens);
  with_real(weight, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, rows_per_piece(hidden), [&](std::int64_t begin, std::int64_t end, int) {
      const std::int64_t first = begin * hidden;
      ops<Real>().layer_norm_backward_input(data_of<Real>(dy) + first, data_of<Real>(x) + first, data_of<Real>(weight),
                                            data_of<Real>(mean) + begin, data_of<Real>(rstd) + begin,
                                            dresidual ? data_of<Real>(dresidual) + first : nullptr, end - begin, hidden,
                                            data_of<Real>(dx) + first);
    });
  });
}

void CpuKernels::layer_norm_backward_weight(TensorView dy, TensorView x, TensorView mean, TensorView rstd, TensorView dweight,
                                            TensorView dbias) {
  const std::int64_t hidden = dweight.num_elements(), tokens = rows_of(x, "x", hidden);
  const DType dtype = dweight.dtype();
  expect(x, "x", dtype, {tokens, hidden});
  expect(dy, "dy", dtype, {tokens, hidden});
  expect(dbias, "dbias", dtype, {hidden});
  TANDEM_CHECK(mean.dtype() == dtype && mean.num_elements() == tokens && rstd.dtype() == dtype && rstd.num_elements() == tokens);
  if (tokens == 0) return;
  with_real(dweight, [&]<class Real>(Real) {
    pool_.run_pieces(hidden, kColumnGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().layer_norm_backward_weight(data_of<Real>(dy), data_of<Real>(x), data_of<Real>(mean), data_of<Real>(rstd),
                                             tokens, hidden, begin, end, data_of<Real>(dweight), data_of<Real>(dbias));
    });
  });
}

void CpuKernels::add_bias(TensorView bias, TensorView x) {
  const std::int64_t width = bias.num_elements(), tokens = rows_of(x, "x", width);
  if (tokens == 0) return;
  expect(x, "x", bias.dtype(), {tokens, width});
  with_real(bias, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, rows_per_piece(width), [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().bias_add(data_of<Real>(x) + begin * width, width, data_of<Real>(bias), end - begin, width);
    });
  });
}

void CpuKernels::bias_backward(TensorView dy, TensorView dbias) {
  const std::int64_t width = dbias.num_elements(), tokens = rows_of(dy, "dy", width);
  if (tokens == 0) return;
  expect(dy, "dy", dbias.dtype(), {tokens, width});
  with_real(dbias, [&]<class Real>(Real) { sum_columns(data_of<Real>(dy), tokens, width, data_of<Real>(dbias)); });
}

void CpuKernels::gelu_forward(TensorView x, TensorView y) {
  TANDEM_CHECK(x.dtype() == y.dtype() && x.num_elements() == y.num_elements());
  with_real(x, [&]<class Real>(Real) {
    const auto forward = pitfalls_.on(Pitfall::gelu_with_erf) ? erf_gelu<Real> : ops<Real>().gelu_forward;
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      forward(data_of<Real>(x) + begin, data_of<Real>(y) + begin, end - begin);
    });
  });
}

void CpuKernels::gelu_backward(TensorView dy, TensorView x, TensorView dx) {
  TANDEM_CHECK(dy.dtype() == x.dtype() && dy.num_elements() == x.num_elements());
  TANDEM_CHECK(dx.dtype() == x.dtype() && dx.num_elements() == x.num_elements());
  with_real(x, [&]<class Real>(Real) {
    const auto backward = pitfalls_.on(Pitfall::gelu_with_erf) ? erf_gelu_backward<Real> : ops<Real>().gelu_backward;
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      backward(data_of<Real>(dy) + begin, data_of<Real>(x) + begin, data_of<Real>(dx) + begin, end - begin);
    });
  });
}

}  // namespace tandem::cpu

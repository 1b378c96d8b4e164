// SPDX-License-Identifier: Apache-2.0
// Layer norm, biases and GELU.
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

/// Scratch for sums of 16-bit columns: they are added to their tensor, which may be 16 bits wide, at the end.
float* zeros(Pieces& pieces, std::int64_t count) {
  float* sums = pieces.take(count);
  std::fill_n(sums, count, 0.0F);
  return sums;
}

}  // namespace

void CpuKernels::layer_norm_forward(TensorView x, TensorView weight, TensorView bias, double epsilon, TensorView y,
                                    TensorView mean, TensorView rstd) {
  const auto [dtype, tokens, hidden] = check_layer_norm(x, weight, bias, y, mean, rstd);
  // Another framework's default: shows only where the variance of a row is small.
  const double used_epsilon = pitfalls_.on(Pitfall::layer_norm_small_epsilon) ? 1e-6 : epsilon;
  if (is_16bit(dtype)) {
    scratch_.reserve(Pieces::bytes(3, hidden));
    pool_.run_pieces(tokens, rows_per_piece(hidden), [&](std::int64_t begin, std::int64_t end, int thread) {
      Pieces parameters = pieces(thread);
      const float *scale = parameters.read<float>(weight, 0, hidden), *shift = parameters.read<float>(bias, 0, hidden);
      half_ops(dtype).layer_norm_forward(halves(x, begin * hidden), scale, shift, static_cast<float>(used_epsilon), end - begin,
                                         hidden, halves(y, begin * hidden), data_of<float>(mean) + begin,
                                         data_of<float>(rstd) + begin, parameters.take(hidden));
    });
    return;
  }
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
  const auto [dtype, tokens, hidden] = check_layer_norm_input(dy, x, weight, mean, rstd, dresidual, dx);
  if (is_16bit(dtype)) {
    scratch_.reserve(Pieces::bytes(1, hidden) + Pieces::bytes(1, 2 * hidden));
    pool_.run_pieces(tokens, rows_per_piece(hidden), [&](std::int64_t begin, std::int64_t end, int thread) {
      Pieces parameters = pieces(thread);
      const std::int64_t first = begin * hidden;
      const float* scale = parameters.read<float>(weight, 0, hidden);
      half_ops(dtype).layer_norm_backward_input(halves(dy, first), halves(x, first), scale, data_of<float>(mean) + begin,
                                                data_of<float>(rstd) + begin, dresidual ? halves(dresidual, first) : nullptr,
                                                end - begin, hidden, halves(dx, first), parameters.take(2 * hidden));
    });
    return;
  }
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
  const auto [dtype, tokens, hidden] = check_layer_norm_weight(dy, x, mean, rstd, dweight, dbias);
  if (tokens == 0) return;
  if (is_16bit(dtype)) {
    scratch_.reserve(Pieces::bytes(4, kColumnGrain));
    pool_.run_pieces(hidden, kColumnGrain, [&](std::int64_t begin, std::int64_t end, int thread) {
      const std::int64_t width = end - begin;
      Pieces sums = pieces(thread);
      float *weights = zeros(sums, width), *biases = zeros(sums, width);
      half_ops(dtype).layer_norm_backward_weight(halves(dy, 0), halves(x, 0), data_of<float>(mean), data_of<float>(rstd), tokens,
                                                 hidden, begin, end, weights, biases);
      ops<float>().add(weights, sums.update<float>(dweight, begin, width), width);
      ops<float>().add(biases, sums.update<float>(dbias, begin, width), width);
      sums.store();
    });
    return;
  }
  with_real(x, [&]<class Real>(Real) {
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
  const std::int64_t step = chunk_items(x.dtype(), tokens, width);
  if (is_16bit(x.dtype())) scratch_.reserve(Pieces::bytes(1, width) + Pieces::bytes(1, step * width));
  with_arithmetic(bias, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, rows_per_piece(width), [&](std::int64_t begin, std::int64_t end, int thread) {
      Pieces parameters = pieces(thread);
      const Real* added = parameters.read<Real>(bias, 0, width);
      for_chunks(begin, end, step, [&](std::int64_t first, std::int64_t count) {
        Pieces rows = parameters.nested();
        ops<Real>().bias_add(rows.update<Real>(x, first * width, count * width), width, added, count, width);
        rows.store();
      });
    });
  });
}

void CpuKernels::bias_backward(TensorView dy, TensorView dbias) {
  const std::int64_t width = dbias.num_elements(), tokens = rows_of(dy, "dy", width);
  if (tokens == 0) return;
  expect(dy, "dy", dy.dtype(), {tokens, width});
  expect_accumulator(dbias, "dbias", dy.dtype());
  if (is_16bit(dy.dtype())) {
    scratch_.reserve(Pieces::bytes(2, kColumnGrain));
    pool_.run_pieces(width, kColumnGrain, [&](std::int64_t begin, std::int64_t end, int thread) {
      Pieces sums = pieces(thread);
      float* sum = zeros(sums, end - begin);
      half_ops(dy.dtype()).column_sum(halves(dy, 0), tokens, width, begin, end, sum);
      ops<float>().add(sum, sums.update<float>(dbias, begin, end - begin), end - begin);
      sums.store();
    });
    return;
  }
  with_real(dbias, [&]<class Real>(Real) {
    pool_.run_pieces(width, kColumnGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().column_sum(data_of<Real>(dy), tokens, width, begin, end, data_of<Real>(dbias));
    });
  });
}

void CpuKernels::gelu_forward(TensorView x, TensorView y) {
  TANDEM_CHECK(x.dtype() == y.dtype() && x.num_elements() == y.num_elements());
  if (is_16bit(x.dtype()) && !pitfalls_.on(Pitfall::gelu_with_erf)) {
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      half_ops(x.dtype()).gelu_forward(halves(x, begin), halves(y, begin), end - begin);
    });
    return;
  }
  with_arithmetic(x, [&]<class Real>(Real) {
    const auto forward = pitfalls_.on(Pitfall::gelu_with_erf) ? erf_gelu<Real> : ops<Real>().gelu_forward;
    for_each_chunk(x.dtype(), x.num_elements(), kGrain, [&](Pieces chunk, std::int64_t first, std::int64_t count) {
      const Real* from = chunk.read<Real>(x, first, count);
      forward(from, chunk.write<Real>(y, first, count), count);
      chunk.store();
    });
  });
}

void CpuKernels::gelu_backward(TensorView dy, TensorView x, TensorView dx) {
  TANDEM_CHECK(dy.dtype() == x.dtype() && dy.num_elements() == x.num_elements());
  TANDEM_CHECK(dx.dtype() == x.dtype() && dx.num_elements() == x.num_elements());
  if (is_16bit(x.dtype()) && !pitfalls_.on(Pitfall::gelu_with_erf)) {
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      half_ops(x.dtype()).gelu_backward(halves(dy, begin), halves(x, begin), halves(dx, begin), end - begin);
    });
    return;
  }
  with_arithmetic(x, [&]<class Real>(Real) {
    const auto backward = pitfalls_.on(Pitfall::gelu_with_erf) ? erf_gelu_backward<Real> : ops<Real>().gelu_backward;
    for_each_chunk(x.dtype(), x.num_elements(), kGrain, [&](Pieces chunk, std::int64_t first, std::int64_t count) {
      const Real *gradient = chunk.read<Real>(dy, first, count), *input = chunk.read<Real>(x, first, count);
      backward(gradient, input, chunk.write<Real>(dx, first, count), count);
      chunk.store();
    });
  });
}

}  // namespace tandem::cpu

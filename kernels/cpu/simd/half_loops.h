// SPDX-License-Identifier: Apache-2.0
// Loops on 16-bit tensors that convert in registers: what the fp32 loop of the same name computes of the widened numbers, rounded
// once. Reductions within a row keep the order of that loop.
#pragma once

#include "kernels/cpu/simd/half_formats.h"
#include "kernels/cpu/simd/norm_loops.h"
#include "kernels/cpu/simd/training_loops.h"
#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

template <class Format>
void widen_all(const Half* from, float* to, Index count) {
  for_half_blocks(count, [&](Index i, Index n) {
    float block[kHalfBlock];
    widen_block<Format>(from + i, block, n);
    __builtin_memcpy(to + i, block, static_cast<std::size_t>(n) * sizeof(float));
  });
}

template <class Format>
void narrow_all(const float* from, Half* to, Index count) {
  for_half_blocks(count, [&](Index i, Index n) {
    float block[kHalfBlock];
    copy_block(from + i, block, n);
    narrow_block<Format>(block, to + i, n);
  });
}

/// out[i] = f(x[i]), out[i] = f(a[i], b[i]): out may be an input.
template <class Format, class F>
inline void map_half(const Half* x, Half* out, Index count, F f) {
  for_half_blocks(count, [&](Index i, Index n) {
    float block[kHalfBlock];
    widen_block<Format>(x + i, block, n);
#pragma omp simd
    for (Index j = 0; j < kHalfBlock; ++j) block[j] = f(block[j]);
    narrow_block<Format>(block, out + i, n);
  });
}
template <class Format, class F>
inline void map_half(const Half* a, const Half* b, Half* out, Index count, F f) {
  for_half_blocks(count, [&](Index i, Index n) {
    float first[kHalfBlock], second[kHalfBlock];
    widen_block<Format>(a + i, first, n);
    widen_block<Format>(b + i, second, n);
#pragma omp simd
    for (Index j = 0; j < kHalfBlock; ++j) first[j] = f(first[j], second[j]);
    narrow_block<Format>(first, out + i, n);
  });
}

template <class Format>
void half_gelu_forward(const Half* x, Half* y, Index count) {
  map_half<Format>(x, y, count, [](float value) { return gelu(value); });
}
template <class Format>
void half_gelu_backward(const Half* dy, const Half* x, Half* dx, Index count) {
  map_half<Format>(dy, x, dx, count, [](float gradient, float value) { return gradient * gelu_derivative(value); });
}
template <class Format>
void half_scale(Half* x, float factor, Index count) {
  map_half<Format>(x, x, count, [factor](float value) { return value * factor; });
}
template <class Format>
void half_sum(const Half* a, const Half* b, Half* out, Index count) {
  map_half<Format>(a, b, out, count, [](float first, float second) { return first + second; });
}
/// y (fp32) += x.
template <class Format>
void half_add_to_single(const Half* x, float* y, Index count) {
  for_half_blocks(count, [&](Index i, Index n) {
    float block[kHalfBlock];
    widen_block<Format>(x + i, block, n);
    if (n == kHalfBlock) {
#pragma omp simd
      for (Index j = 0; j < kHalfBlock; ++j) y[i + j] += block[j];
    } else {
      for (Index j = 0; j < n; ++j) y[i + j] += block[j];
    }
  });
}

template <class Format>
double half_squared_norm(const Half* x, Index count) {
  constexpr Index kSums = 16;
  static_assert(kSums % kHalfBlock == 0);
  double sums[kSums] = {};
  const Index whole = count / kSums * kSums;
  for (Index i = 0; i < whole; i += kSums) {
    float values[kSums];
    for (Index k = 0; k < kSums; k += kHalfBlock) Format::widen(x + i + k, values + k);
#pragma omp simd
    for (Index j = 0; j < kSums; ++j) {
      const double value = static_cast<double>(values[j]);
      sums[j] += value * value;
    }
  }
  float last[kSums];
  widen_all<Format>(x + whole, last, count - whole);
  for (Index j = 0; j < count - whole; ++j) {
    const double value = static_cast<double>(last[j]);
    sums[j] += value * value;
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

/// Widens, and returns the largest.
template <class Format>
inline float widen_and_maximum(const Half* from, float* to, Index count) {
  float largest[kHalfBlock];
  for (float& lane : largest) lane = -__builtin_inff();
  const Index whole = count / kHalfBlock * kHalfBlock;
  for (Index i = 0; i < whole; i += kHalfBlock) {
    Format::widen(from + i, to + i);
#pragma omp simd
    for (Index j = 0; j < kHalfBlock; ++j) largest[j] = to[i + j] > largest[j] ? to[i + j] : largest[j];
  }
  widen_all<Format>(from + whole, to + whole, count - whole);
  float result = maximum(largest, kHalfBlock);
  for (Index i = whole; i < count; ++i) result = to[i] > result ? to[i] : result;
  return result;
}

/// row: scratch of `hidden` elements.
template <class Format>
void half_layer_norm_forward(const Half* x, const float* weight, const float* bias, float epsilon, Index tokens, Index hidden,
                             Half* y, float* mean, float* rstd, float* row) {
  for (Index t = 0; t < tokens; ++t) {
    widen_all<Format>(x + t * hidden, row, hidden);
    row_statistics(row, epsilon, hidden, mean[t], rstd[t]);
    const float center = mean[t], inverse = rstd[t];
    Half* out = y + t * hidden;
    for_half_blocks(hidden, [&](Index i, Index n) {
      float value[kHalfBlock], scale[kHalfBlock], shift[kHalfBlock];
      copy_block(row + i, value, n);
      copy_block(weight + i, scale, n);
      copy_block(bias + i, shift, n);
#pragma omp simd
      for (Index j = 0; j < kHalfBlock; ++j) value[j] = (value[j] - center) * inverse * scale[j] + shift[j];
      narrow_block<Format>(value, out + i, n);
    });
  }
}

/// rows: scratch of 2 hidden elements.
template <class Format>
void half_layer_norm_backward_input(const Half* dy, const Half* x, const float* weight, const float* mean, const float* rstd,
                                    const Half* dresidual, Index tokens, Index hidden, Half* dx, float* rows) {
  float *gradient = rows, *row = rows + hidden;
  for (Index t = 0; t < tokens; ++t) {
    const float center = mean[t], inverse = rstd[t];
    widen_all<Format>(dy + t * hidden, gradient, hidden);
    widen_all<Format>(x + t * hidden, row, hidden);
    float mean_g, mean_dot;
    gradient_means(gradient, row, weight, center, inverse, hidden, mean_g, mean_dot);
    for_half_blocks(hidden, [&](Index i, Index n) {
      float g[kHalfBlock], value[kHalfBlock], scale[kHalfBlock], residual[kHalfBlock];
      copy_block(gradient + i, g, n);
      copy_block(row + i, value, n);
      copy_block(weight + i, scale, n);
      if (dresidual == nullptr) {
#pragma omp simd
        for (Index j = 0; j < kHalfBlock; ++j) {
          const float xhat = (value[j] - center) * inverse;
          g[j] = inverse * (g[j] * scale[j] - mean_g - xhat * mean_dot);
        }
      } else {
        widen_block<Format>(dresidual + t * hidden + i, residual, n);
#pragma omp simd
        for (Index j = 0; j < kHalfBlock; ++j) {
          const float xhat = (value[j] - center) * inverse;
          g[j] = residual[j] + inverse * (g[j] * scale[j] - mean_g - xhat * mean_dot);
        }
      }
      narrow_block<Format>(g, dx + t * hidden + i, n);
    });
  }
}

/// Groups of rows as in column_sum(); dweight and dbias are fp32, of the columns [c0, c1).
template <class Format>
void half_layer_norm_backward_weight(const Half* dy, const Half* x, const float* mean, const float* rstd, Index tokens,
                                     Index hidden, Index c0, Index c1, float* dweight, float* dbias) {
  constexpr Index kRows = 32, kColumns = 64;
  for (Index first = c0; first < c1; first += kColumns) {
    const Index width = c1 - first < kColumns ? c1 - first : kColumns;
    float weight_total[kColumns] = {}, bias_total[kColumns] = {};
    for (Index group = 0; group < tokens; group += kRows) {
      const Index end = tokens - group < kRows ? tokens : group + kRows;
      float weight_part[kColumns] = {}, bias_part[kColumns] = {};
      for (Index t = group; t < end; ++t) {
        const float center = mean[t], inverse = rstd[t];
        for_half_blocks(width, [&](Index i, Index n) {
          float gradient[kHalfBlock], value[kHalfBlock];
          widen_block<Format>(dy + t * hidden + first + i, gradient, n);
          widen_block<Format>(x + t * hidden + first + i, value, n);
#pragma omp simd
          for (Index j = 0; j < kHalfBlock; ++j) {
            weight_part[i + j] += gradient[j] * ((value[j] - center) * inverse);
            bias_part[i + j] += gradient[j];
          }
        });
      }
#pragma omp simd
      for (Index c = 0; c < kColumns; ++c) {
        weight_total[c] += weight_part[c];
        bias_total[c] += bias_part[c];
      }
    }
    for (Index c = 0; c < width; ++c) {
      dweight[first - c0 + c] += weight_total[c];
      dbias[first - c0 + c] += bias_total[c];
    }
  }
}

template <class Format>
void half_column_sum(const Half* x, Index rows, Index stride, Index c0, Index c1, float* sum) {
  constexpr Index kRows = 32, kColumns = 64;
  for (Index first = c0; first < c1; first += kColumns) {
    const Index width = c1 - first < kColumns ? c1 - first : kColumns;
    float total[kColumns] = {};
    for (Index group = 0; group < rows; group += kRows) {
      const Index end = rows - group < kRows ? rows : group + kRows;
      float part[kColumns] = {};
      for (Index r = group; r < end; ++r) {
        for_half_blocks(width, [&](Index i, Index n) {
          float value[kHalfBlock];
          widen_block<Format>(x + r * stride + first + i, value, n);
#pragma omp simd
          for (Index j = 0; j < kHalfBlock; ++j) part[i + j] += value[j];
        });
      }
#pragma omp simd
      for (Index c = 0; c < kColumns; ++c) total[c] += part[c];
    }
    for (Index c = 0; c < width; ++c) sum[first - c0 + c] += total[c];
  }
}

/// row: scratch of `vocabulary` elements.
template <class Format>
double half_cross_entropy_gradient(Half* logits, Index vocabulary, std::int32_t target, float scale, float* row) {
  const float largest = widen_and_maximum<Format>(logits, row, vocabulary);
  const double target_logit = static_cast<double>(row[target]);
  const double sum = exponential_sum<true>(row, vocabulary, largest);
  const float factor = static_cast<float>(static_cast<double>(scale) / sum);
  for_half_blocks(vocabulary, [&](Index i, Index n) {
    float value[kHalfBlock];
    copy_block(row + i, value, n);
#pragma omp simd
    for (Index j = 0; j < kHalfBlock; ++j) value[j] *= factor;
    if (target >= i && target < i + n) value[target - i] -= scale;
    narrow_block<Format>(value, logits + i, n);
  });
  return __builtin_log(sum) + static_cast<double>(largest) - target_logit;
}

template <class Format>
constexpr HalfOps kHalfOps = {
    .widen = widen_all<Format>,
    .narrow = narrow_all<Format>,
    .gelu_forward = half_gelu_forward<Format>,
    .gelu_backward = half_gelu_backward<Format>,
    .scale = half_scale<Format>,
    .sum = half_sum<Format>,
    .add_to_single = half_add_to_single<Format>,
    .squared_norm = half_squared_norm<Format>,
    .layer_norm_forward = half_layer_norm_forward<Format>,
    .layer_norm_backward_input = half_layer_norm_backward_input<Format>,
    .layer_norm_backward_weight = half_layer_norm_backward_weight<Format>,
    .column_sum = half_column_sum<Format>,
    .cross_entropy_gradient = half_cross_entropy_gradient<Format>,
};

}  // namespace
}  // namespace tandem::cpu

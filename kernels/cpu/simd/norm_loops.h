// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

/// Two passes over a row that is in the first-level cache by then: the variance is that of the differences, so that a large mean
/// costs no digits.
template <class Real>
inline void row_statistics(const Real* row, Real epsilon, Index hidden, Real& mean, Real& rstd) {
  const Real divisor = static_cast<Real>(hidden);
  Real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (Index c = 0; c < hidden; ++c) sum += row[c];
  const Real center = sum / divisor;
  Real squares = 0;
#pragma omp simd reduction(+ : squares)
  for (Index c = 0; c < hidden; ++c) {
    const Real difference = row[c] - center;
    squares += difference * difference;
  }
  mean = center;
  rstd = Real(1) / square_root(squares / divisor + epsilon);
}

template <class Real>
void layer_norm_forward(const Real* x, const Real* weight, const Real* bias, Real epsilon, Index tokens, Index hidden, Real* y,
                        Real* mean, Real* rstd) {
  for (Index t = 0; t < tokens; ++t) {
    const Real* row = x + t * hidden;
    row_statistics(row, epsilon, hidden, mean[t], rstd[t]);
    const Real center = mean[t], inverse = rstd[t];
    Real* out = y + t * hidden;
#pragma omp simd
    for (Index c = 0; c < hidden; ++c) out[c] = (row[c] - center) * inverse * weight[c] + bias[c];
  }
}

/// Means over a row of g = gradient * weight, and of g xhat.
template <class Real>
inline void gradient_means(const Real* gradient, const Real* row, const Real* weight, Real center, Real inverse, Index hidden,
                           Real& mean_g, Real& mean_dot) {
  const Real divisor = static_cast<Real>(hidden);
  Real sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
  for (Index c = 0; c < hidden; ++c) {
    const Real g = gradient[c] * weight[c];
    sum += g;
    dot += g * ((row[c] - center) * inverse);
  }
  mean_g = sum / divisor;
  mean_dot = dot / divisor;
}

template <class Real>
void layer_norm_backward_input(const Real* dy, const Real* x, const Real* weight, const Real* mean, const Real* rstd,
                               const Real* dresidual, Index tokens, Index hidden, Real* dx) {
  for (Index t = 0; t < tokens; ++t) {
    const Real* gradient = dy + t * hidden;
    const Real* row = x + t * hidden;
    const Real center = mean[t], inverse = rstd[t];
    Real mean_g, mean_dot;
    gradient_means(gradient, row, weight, center, inverse, hidden, mean_g, mean_dot);
    Real* out = dx + t * hidden;
    if (dresidual == nullptr) {
#pragma omp simd
      for (Index c = 0; c < hidden; ++c) {
        const Real xhat = (row[c] - center) * inverse;
        out[c] = inverse * (gradient[c] * weight[c] - mean_g - xhat * mean_dot);
      }
    } else {
      const Real* residual = dresidual + t * hidden;
#pragma omp simd
      for (Index c = 0; c < hidden; ++c) {
        const Real xhat = (row[c] - center) * inverse;
        out[c] = residual[c] + inverse * (gradient[c] * weight[c] - mean_g - xhat * mean_dot);
      }
    }
  }
}

/// Groups of rows as in column_sum().
template <class Real>
void layer_norm_backward_weight(const Real* dy, const Real* x, const Real* mean, const Real* rstd, Index tokens, Index hidden,
                                Index c0, Index c1, Real* dweight, Real* dbias) {
  constexpr Index kRows = 32, kColumns = 64;
  for (Index first = c0; first < c1; first += kColumns) {
    const Index width = c1 - first < kColumns ? c1 - first : kColumns;
    Real weight_total[kColumns] = {}, bias_total[kColumns] = {};
    for (Index group = 0; group < tokens; group += kRows) {
      const Index end = tokens - group < kRows ? tokens : group + kRows;
      Real weight_part[kColumns] = {}, bias_part[kColumns] = {};
      for (Index t = group; t < end; ++t) {
        const Real* gradient = dy + t * hidden + first;
        const Real* row = x + t * hidden + first;
        const Real center = mean[t], inverse = rstd[t];
#pragma omp simd
        for (Index c = 0; c < width; ++c) {
          weight_part[c] += gradient[c] * ((row[c] - center) * inverse);
          bias_part[c] += gradient[c];
        }
      }
#pragma omp simd
      for (Index c = 0; c < width; ++c) {
        weight_total[c] += weight_part[c];
        bias_total[c] += bias_part[c];
      }
    }
#pragma omp simd
    for (Index c = 0; c < width; ++c) {
      dweight[first + c] += weight_total[c];
      dbias[first + c] += bias_total[c];
    }
  }
}

}  // namespace
}  // namespace tandem::cpu

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

template <class Real>
inline Real maximum(const Real* x, Index count) {
  Real result = x[0];
#pragma omp simd reduction(max : result)
  for (Index i = 1; i < count; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

constexpr Index kSumPiece = 2048;  // sums of this many are added up in double: a vocabulary's sum keeps its last digits

/// Sum of e^(x - shift), in double; kStore also overwrites x by the terms.
template <bool kStore, class Real>
inline double exponential_sum(Real* x, Index count, Real shift) {
  double total = 0;
  for (Index first = 0; first < count; first += kSumPiece) {
    const Index end = count - first < kSumPiece ? count : first + kSumPiece;
    Real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Index i = first; i < end; ++i) {
      const Real term = exponential(x[i] - shift);
      if constexpr (kStore) x[i] = term;
      sum += term;
    }
    total += static_cast<double>(sum);
  }
  return total;
}

template <class Real>
double cross_entropy(const Real* logits, Index vocabulary, std::int32_t target) {
  const Real largest = maximum(logits, vocabulary);
  const double sum = exponential_sum<false>(const_cast<Real*>(logits), vocabulary, largest);  // kStore = false: not written
  return __builtin_log(sum) + static_cast<double>(largest) - static_cast<double>(logits[target]);
}

template <class Real>
double cross_entropy_gradient(Real* logits, Index vocabulary, std::int32_t target, Real scale) {
  const Real largest = maximum(logits, vocabulary);
  const double target_logit = static_cast<double>(logits[target]);
  const double sum = exponential_sum<true>(logits, vocabulary, largest);
  const Real factor = static_cast<Real>(static_cast<double>(scale) / sum);
#pragma omp simd
  for (Index i = 0; i < vocabulary; ++i) logits[i] *= factor;
  logits[target] -= scale;
  return __builtin_log(sum) + static_cast<double>(largest) - target_logit;
}

template <class Real>
void softmax_statistics(const Real* logits, Index columns, Real* statistics) {
  statistics[0] = -static_cast<Real>(__builtin_inf());
  statistics[1] = Real(0);
  if (columns == 0) return;
  statistics[0] = maximum(logits, columns);
  statistics[1] = static_cast<Real>(exponential_sum<false>(const_cast<Real*>(logits), columns, statistics[0]));
}

template <class Real>
void softmax_scaled(Real* logits, Index columns, Real logsumexp, Real scale) {
#pragma omp simd
  for (Index i = 0; i < columns; ++i) logits[i] = scale * exponential(logits[i] - logsumexp);
}

template <bool kEpsilonInsideRoot, class Real>
inline void adamw_loop(const AdamWConstants<Real>& constants, const Real* __restrict gradient, Real* __restrict parameter,
                       Real* __restrict m, Real* __restrict v, Index count) {
  const AdamWConstants<Real> c = constants;
#pragma omp simd
  for (Index i = 0; i < count; ++i) {
    const Real g = gradient[i] * c.gradient_scale;
    const Real first = c.beta1 * m[i] + c.one_minus_beta1 * g;
    const Real second = c.beta2 * v[i] + c.one_minus_beta2 * (g * g);
    m[i] = first;
    v[i] = second;
    const Real corrected = second * c.second_correction;
    const Real denominator = kEpsilonInsideRoot ? square_root(corrected + c.epsilon) : square_root(corrected) + c.epsilon;
    parameter[i] = parameter[i] * c.decay - c.rate * (first / denominator);
  }
}

template <class Real>
void adamw(const AdamWConstants<Real>& c, const Real* gradient, Real* parameter, Real* m, Real* v, Index count) {
  adamw_loop<false>(c, gradient, parameter, m, v, count);
}

template <class Real>
void adamw_epsilon_inside_root(const AdamWConstants<Real>& c, const Real* gradient, Real* parameter, Real* m, Real* v,
                               Index count) {
  adamw_loop<true>(c, gradient, parameter, m, v, count);
}

template <class Real>
void sgd(Real decay, Real rate, const Real* gradient, Real* parameter, Index count) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) parameter[i] = parameter[i] * decay - rate * gradient[i];
}

/// Sixteen running sums whatever the instruction set, so that the order of additions is the same on all.
template <class Real>
double squared_norm(const Real* x, Index count) {
  constexpr Index kSums = 16;
  double sums[kSums] = {};
  const Index whole = count / kSums * kSums;
  for (Index i = 0; i < whole; i += kSums) {
#pragma omp simd
    for (Index j = 0; j < kSums; ++j) {
      const double value = static_cast<double>(x[i + j]);
      sums[j] += value * value;
    }
  }
  for (Index i = whole; i < count; ++i) {
    const double value = static_cast<double>(x[i]);
    sums[i - whole] += value * value;
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace
}  // namespace tandem::cpu

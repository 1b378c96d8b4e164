// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

template <class Real>
void embedding_forward(const std::int32_t* ids, const std::int32_t* positions, const Real* wte, const Real* wpe, Real* out,
                       Index tokens, Index hidden) {
  for (Index t = 0; t < tokens; ++t) {
    const Real* token = wte + ids[t] * hidden;
    const Real* position = wpe + positions[t] * hidden;
    Real* row = out + t * hidden;
#pragma omp simd
    for (Index c = 0; c < hidden; ++c) row[c] = token[c] + position[c];
  }
}

template <class Real>
void embedding_backward(const std::int32_t* ids, const std::int32_t* positions, const Real* dout, Real* dwte, Real* dwpe,
                        Index tokens, Index hidden, Index c0, Index c1) {
  for (Index t = 0; t < tokens; ++t) {
    const Real* row = dout + t * hidden;
    Real* token = dwte + ids[t] * hidden;
    Real* position = dwpe + positions[t] * hidden;
#pragma omp simd
    for (Index c = c0; c < c1; ++c) token[c] += row[c];
#pragma omp simd
    for (Index c = c0; c < c1; ++c) position[c] += row[c];
  }
}

template <class Real>
void bias_add(Real* y, Index stride, const Real* bias, Index rows, Index columns) {
  for (Index r = 0; r < rows; ++r) {
    Real* row = y + r * stride;
#pragma omp simd
    for (Index c = 0; c < columns; ++c) row[c] += bias[c];
  }
}

template <class Real>
void bias_gelu(Real* y_pre, Real* y, Index stride, const Real* bias, Index rows, Index columns) {
  for (Index r = 0; r < rows; ++r) {
    Real* before = y_pre + r * stride;
    Real* after = y + r * stride;
#pragma omp simd
    for (Index c = 0; c < columns; ++c) {
      const Real value = before[c] + bias[c];
      before[c] = value;
      after[c] = gelu(value);
    }
  }
}

/// Groups of rows are summed by themselves and then added up: a shorter chain of roundings than one sum over all rows.
template <class Real>
void column_sum(const Real* x, Index rows, Index stride, Index c0, Index c1, Real* sum) {
  constexpr Index kRows = 32, kColumns = 64;
  for (Index first = c0; first < c1; first += kColumns) {
    const Index width = c1 - first < kColumns ? c1 - first : kColumns;
    Real total[kColumns] = {};
    for (Index group = 0; group < rows; group += kRows) {
      const Index end = rows - group < kRows ? rows : group + kRows;
      Real part[kColumns] = {};
      for (Index r = group; r < end; ++r) {
        const Real* row = x + r * stride + first;
#pragma omp simd
        for (Index c = 0; c < width; ++c) part[c] += row[c];
      }
#pragma omp simd
      for (Index c = 0; c < width; ++c) total[c] += part[c];
    }
#pragma omp simd
    for (Index c = 0; c < width; ++c) sum[first + c] += total[c];
  }
}

template <class Real>
void gelu_forward(const Real* x, Real* y, Index count) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) y[i] = gelu(x[i]);
}

template <class Real>
void gelu_backward(const Real* dy, const Real* x, Real* dx, Index count) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) dx[i] = dy[i] * gelu_derivative(x[i]);
}

template <class Real>
void fill(Real* x, Real value, Index count) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) x[i] = value;
}

template <class Real>
void scale(Real* x, Real factor, Index count) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) x[i] *= factor;
}

template <class Real>
void add(const Real* x, Real* y, Index count) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) y[i] += x[i];
}

template <class Real>
void sum(const Real* a, const Real* b, Real* out, Index count) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

template <class Real>
void exponential_all(const Real* x, Real* y, Index count) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) y[i] = exponential(x[i]);
}

}  // namespace
}  // namespace tandem::cpu

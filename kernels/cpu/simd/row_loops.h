// SPDX-License-Identifier: Apache-2.0
// Rows of tables picked by index: vocabulary parts, and tokens on their way to experts and back. Negative indices are left out.
#pragma once

#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

template <class Real>
void add_gathered_rows(const std::int32_t* ids, const Real* table, Real* out, Index tokens, Index width) {
  for (Index t = 0; t < tokens; ++t) {
    if (ids[t] < 0) continue;
    const Real* from = table + ids[t] * width;
    Real* to = out + t * width;
#pragma omp simd
    for (Index c = 0; c < width; ++c) to[c] += from[c];
  }
}

template <class Real>
void scatter_add_rows(const std::int32_t* ids, const Real* x, Real* table, Index tokens, Index width, Index c0, Index c1) {
  for (Index t = 0; t < tokens; ++t) {
    if (ids[t] < 0) continue;
    const Real* from = x + t * width;
    Real* to = table + ids[t] * width;
#pragma omp simd
    for (Index c = c0; c < c1; ++c) to[c] += from[c];
  }
}

template <class Real>
void combine_rows(const std::int32_t* slots, const Real* gates, const Real* y, Real* out, Index tokens, Index choices,
                  Index width) {
  for (Index t = 0; t < tokens; ++t) {
    Real* to = out + t * width;
    bool first = true;
    for (Index k = t * choices; k < (t + 1) * choices; ++k) {
      if (slots[k] < 0) continue;
      const Real* from = y + slots[k] * width;
      const Real gate = gates[k];
      if (first) {
#pragma omp simd
        for (Index c = 0; c < width; ++c) to[c] = gate * from[c];
      } else {
#pragma omp simd
        for (Index c = 0; c < width; ++c) to[c] += gate * from[c];
      }
      first = false;
    }
    if (!first) continue;
    for (Index c = 0; c < width; ++c) to[c] = Real(0);
  }
}

template <class Real>
void combine_rows_backward(const std::int32_t* slots, const Real* gates, const Real* dout, const Real* y, Real* dgates, Real* dy,
                           Index tokens, Index choices, Index width) {
  for (Index t = 0; t < tokens; ++t) {
    const Real* gradient = dout + t * width;
    for (Index k = t * choices; k < (t + 1) * choices; ++k) {
      dgates[k] = Real(0);
      if (slots[k] < 0) continue;
      const Real* row = y + slots[k] * width;
      Real* drow = dy + slots[k] * width;
      const Real gate = gates[k];
      Real dot = 0;
#pragma omp simd reduction(+ : dot)
      for (Index c = 0; c < width; ++c) {
        dot += gradient[c] * row[c];
        drow[c] = gate * gradient[c];
      }
      dgates[k] = dot;
    }
  }
}

}  // namespace
}  // namespace tandem::cpu

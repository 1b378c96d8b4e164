// SPDX-License-Identifier: Apache-2.0
// The contiguous buffers that attention works in, and the copies into and out of them.
#pragma once

#include "kernels/cpu/simd/gemm_loops.h"

namespace tandem::cpu {
namespace {

constexpr Index kQueries = 32;

inline Index round_up(Index value, Index multiple) { return (value + multiple - 1) / multiple * multiple; }

/// The buffers of one head, cut from its scratch.
template <class Real>
struct HeadBuffers {
  Index channels;             // head_size padded to registers
  Index padded_keys;          // keys padded to panels of kTileColumns
  Index strip_stride;         // padded_keys and one more register, so that the rows of a strip do not share cache sets
  Real *k_panels, *v_panels;  // [padded_keys / kTileColumns][head_size][kTileColumns]: transposed
  Real *k, *v;                // [keys, channels]
  Real *dk, *dv;              // [keys, channels]
  Real *query, *dout, *out;   // [kQueries, channels]
  Real *scores, *dscores;     // [kQueries, strip_stride]

  HeadBuffers(Index keys, Index head_size, Real* scratch) {
    channels = round_up(head_size, Register<Real>::kLanes);
    padded_keys = round_up(keys, kTileColumns<Real>);
    strip_stride = padded_keys + Register<Real>::kLanes;
    k_panels = take(scratch, padded_keys * head_size);
    v_panels = take(scratch, padded_keys * head_size);
    k = take(scratch, keys * channels);
    v = take(scratch, keys * channels);
    dk = take(scratch, keys * channels);
    dv = take(scratch, keys * channels);
    query = take(scratch, kQueries * channels);
    dout = take(scratch, kQueries * channels);
    out = take(scratch, kQueries * channels);
    scores = take(scratch, kQueries * strip_stride);
    dscores = take(scratch, kQueries * strip_stride);
  }
  Index used = 0;  // elements of scratch

 private:
  /// A null scratch is only measured.
  Real* take(Real* scratch, Index count) {
    Real* taken = scratch == nullptr ? nullptr : scratch + used;
    used += round_up(count, 64 / static_cast<Index>(sizeof(Real)));
    return taken;
  }
};

template <class Real>
Index attention_scratch(Index keys, Index head_size) {
  return HeadBuffers<Real>(keys, head_size, nullptr).used;
}

/// to [rows, channels] = factor * from, padding zero.
template <class Real>
inline void copy_rows(const Real* from, Index stride, Index rows, Index head_size, Index channels, Real factor, Real* to) {
  for (Index t = 0; t < rows; ++t) {
    const Real* source = from + t * stride;
    Real* target = to + t * channels;
#pragma omp simd
    for (Index c = 0; c < head_size; ++c) target[c] = factor * source[c];
    for (Index c = head_size; c < channels; ++c) target[c] = Real(0);
  }
}

/// to = factor * from, or to += where that is asked for.
template <class Real>
inline void store_rows(const Real* from, Index channels, Index rows, Index head_size, Real factor, bool add, Real* to,
                       Index stride) {
  for (Index t = 0; t < rows; ++t) {
    const Real* source = from + t * channels;
    Real* target = to + t * stride;
    if (add) {
#pragma omp simd
      for (Index c = 0; c < head_size; ++c) target[c] += factor * source[c];
    } else {
#pragma omp simd
      for (Index c = 0; c < head_size; ++c) target[c] = factor * source[c];
    }
  }
}

/// to = carry[row] * to + from.
template <class Real>
inline void merge_rows(const Real* from, Index channels, Index rows, Index head_size, const Real* carry, Real* to, Index stride) {
  for (Index t = 0; t < rows; ++t) {
    const Real* source = from + t * channels;
    Real* target = to + t * stride;
    const Real factor = carry[t];
#pragma omp simd
    for (Index c = 0; c < head_size; ++c) target[c] = factor * target[c] + source[c];
  }
}

/// panels[s / columns][channel][s % columns] = from[s, channel], padding zero.
template <class Real>
inline void transpose_into_panels(const Real* from, Index stride, Index sequence, Index head_size, Real* panels) {
  constexpr Index kColumns = kTileColumns<Real>;
  for (Index first = 0; first < sequence; first += kColumns, panels += kColumns * head_size) {
    const Index width = sequence - first < kColumns ? sequence - first : kColumns;
    for (Index c = 0; c < head_size; ++c) {
      Real* line = panels + c * kColumns;
      const Real* source = from + first * stride + c;
      for (Index s = 0; s < width; ++s) line[s] = source[s * stride];
      for (Index s = width; s < kColumns; ++s) line[s] = Real(0);
    }
  }
}

}  // namespace
}  // namespace tandem::cpu

// SPDX-License-Identifier: Apache-2.0
// Attention of one (row, head), queries in tiles of kQueries. The scores of a tile against all keys that it sees are one strip
// [kQueries, keys], made, used and overwritten by the next tile: no [sequence, sequence] matrix exists. Keys and values are
// copied once into contiguous buffers padded to whole registers, so that every product is a padded_gemm().
#pragma once

#include "kernels/cpu/simd/gemm_loops.h"
#include "kernels/cpu/simd/random_loops.h"
#include "kernels/cpu/simd/training_loops.h"
#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

constexpr Index kQueries = 32;

inline Index round_up(Index value, Index multiple) { return (value + multiple - 1) / multiple * multiple; }

/// The buffers of one head, cut from its scratch.
template <class Real>
struct HeadBuffers {
  Index channels;             // head_size padded to registers
  Index keys;                 // sequence padded to panels of kTileColumns
  Index strip_stride;         // keys and one more register, so that the rows of a strip do not share cache sets
  Real *k_panels, *v_panels;  // [keys / kTileColumns][head_size][kTileColumns]: transposed
  Real *k, *v;                // [sequence, channels]
  Real *dk, *dv;              // [sequence, channels]
  Real *query, *dout, *out;   // [kQueries, channels]
  Real *scores, *dscores;     // [kQueries, strip_stride]

  HeadBuffers(Index sequence, Index head_size, Real* scratch) {
    channels = round_up(head_size, Register<Real>::kLanes);
    keys = round_up(sequence, kTileColumns<Real>);
    strip_stride = keys + Register<Real>::kLanes;
    k_panels = take(scratch, keys * head_size);
    v_panels = take(scratch, keys * head_size);
    k = take(scratch, sequence * channels);
    v = take(scratch, sequence * channels);
    dk = take(scratch, sequence * channels);
    dv = take(scratch, sequence * channels);
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
Index attention_scratch(Index sequence, Index head_size) {
  return HeadBuffers<Real>(sequence, head_size, nullptr).used;
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

template <class Real>
inline void store_rows(const Real* from, Index channels, Index rows, Index head_size, Real factor, Real* to, Index stride) {
  for (Index t = 0; t < rows; ++t) {
#pragma omp simd
    for (Index c = 0; c < head_size; ++c) to[t * stride + c] = factor * from[t * channels + c];
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

/// The queries of one tile and the keys that they see together.
struct Tile {
  Index first, rows;     // queries [first, first + rows)
  Index begin, end;      // keys that some query of the tile sees
  Index panel, columns;  // what the strip holds: keys [panel * kTileColumns, ... + columns), columns in whole panels
};

inline Index start_of(const std::int32_t* document_starts, Index query) {
  return document_starts == nullptr ? 0 : document_starts[query];
}

template <class Real>
inline Tile make_tile(const AttentionHead<Real>& head, Index first) {
  Tile result;
  result.first = first;
  result.rows = head.sequence - first < kQueries ? head.sequence - first : kQueries;
  result.end = first + result.rows;
  result.begin = first;
  for (Index t = first; t < result.end; ++t) {
    const Index start = start_of(head.document_starts, t);
    result.begin = start < result.begin ? start : result.begin;
  }
  result.panel = result.begin / kTileColumns<Real>;
  result.columns = round_up(result.end, kTileColumns<Real>) - result.panel * kTileColumns<Real>;
  return result;
}

/// strip [rows, columns] = left [rows, channels] times the panels of `right`.
template <class Real>
inline void strip_product(const Tile& part, Index head_size, const Real* left, Index channels, const Real* right, Real* strip,
                          Index strip_stride) {
  constexpr Index kColumns = kTileColumns<Real>;
  for (Index j = 0; j < part.columns; j += kColumns) {
    const Real* panel = right + (part.panel * kColumns + j) * head_size;
    tile_strip<kTileRegisters>(part.rows, head_size, left, channels, Index{1}, panel, kColumns, strip + j, strip_stride, false);
  }
}

/// Zeros in a strip's row outside [begin, end), positions relative to the strip.
template <class Real>
inline void clear_outside(Real* row, Index begin, Index end, Index columns) {
  for (Index s = 0; s < begin; ++s) row[s] = Real(0);
  for (Index s = end; s < columns; ++s) row[s] = Real(0);
}

template <class Real>
inline std::uint64_t mask_element(const AttentionHead<Real>& head, Index query, Index key) {
  return head.mask_first_element + static_cast<std::uint64_t>(query * head.mask_row_elements + key);
}

/// Scores of a tile become (dropped) probabilities, and logsumexp is kept.
template <class Real>
inline void softmax_tile(const AttentionHead<Real>& head, const Tile& part, Real* scores, Index stride) {
  const Index origin = part.panel * kTileColumns<Real>;
  for (Index t = part.first; t < part.first + part.rows; ++t) {
    Real* row = scores + (t - part.first) * stride;
    const Index start = start_of(head.document_starts, t);
    const Index begin = start - origin, end = t + 1 - origin;
    const Real largest = maximum(row + begin, end - begin);
    const double sum = exponential_sum<true>(row + begin, end - begin, largest);
    const Real inverse = static_cast<Real>(1.0 / sum);
    head.logsumexp[t] = static_cast<Real>(static_cast<double>(largest) + __builtin_log(sum));
    if (head.mask == nullptr) {
#pragma omp simd
      for (Index s = begin; s < end; ++s) row[s] *= inverse;
    } else {
      const Real factor = inverse * head.keep_scale;
      const std::uint32_t threshold = head.mask->threshold;
      for_mask(*head.mask, mask_element(head, t, start), end - begin, [&](const std::uint32_t* words, Index from, Index to) {
        Real* visible = row + begin;
#pragma omp simd
        for (Index s = from; s < to; ++s) visible[s] = words[s - from] >= threshold ? visible[s] * factor : Real(0);
      });
    }
    clear_outside(row, begin, end, part.columns);
  }
}

template <class Real>
void attention_forward(const AttentionHead<Real>& head) {
  const HeadBuffers<Real> buffers(head.sequence, head.head_size, head.scratch);
  const Index channels = buffers.channels;
  transpose_into_panels(head.k, head.qkv_stride, head.sequence, head.head_size, buffers.k_panels);
  copy_rows(head.v, head.qkv_stride, head.sequence, head.head_size, channels, Real(1), buffers.v);
  for (Index first = 0; first < head.sequence; first += kQueries) {
    const Tile part = make_tile(head, first);
    const Index origin = part.panel * kTileColumns<Real>;
    copy_rows(head.q + first * head.qkv_stride, head.qkv_stride, part.rows, head.head_size, channels, head.scale, buffers.query);
    strip_product(part, head.head_size, buffers.query, channels, buffers.k_panels, buffers.scores, buffers.strip_stride);
    softmax_tile(head, part, buffers.scores, buffers.strip_stride);
    padded_gemm(part.rows, channels, part.end - part.begin, buffers.scores + (part.begin - origin), buffers.strip_stride,
                Index{1}, buffers.v + part.begin * channels, channels, buffers.out, channels, false);
    store_rows(buffers.out, channels, part.rows, head.head_size, Real(1), head.out + first * head.out_stride, head.out_stride);
  }
}

/// In place: scores become (dropped) probabilities P~, dscores (dP~ on entry) become P (dP - D), D = sum(dout * out).
template <class Real>
inline void softmax_backward_tile(const AttentionHead<Real>& head, const Tile& part, Real* scores, Real* dscores, Index stride) {
  const Index origin = part.panel * kTileColumns<Real>;
  for (Index t = part.first; t < part.first + part.rows; ++t) {
    const Index start = start_of(head.document_starts, t);
    const Index begin = start - origin, end = t + 1 - origin;
    Real* row = scores + (t - part.first) * stride;
    Real* drow = dscores + (t - part.first) * stride;
    const Real *dout = head.dout + t * head.out_stride, *out = head.out + t * head.out_stride;
    Real dot = 0;
#pragma omp simd reduction(+ : dot)
    for (Index c = 0; c < head.head_size; ++c) dot += dout[c] * out[c];
    const Real normalizer = head.logsumexp[t];
    if (head.mask == nullptr) {
#pragma omp simd
      for (Index s = begin; s < end; ++s) {
        const Real probability = exponential(row[s] - normalizer);
        row[s] = probability;
        drow[s] = probability * (drow[s] - dot);
      }
    } else {
      const std::uint32_t threshold = head.mask->threshold;
      const Real keep_scale = head.keep_scale;
      for_mask(*head.mask, mask_element(head, t, start), end - begin, [&](const std::uint32_t* words, Index from, Index to) {
        Real *visible = row + begin, *dvisible = drow + begin;
#pragma omp simd
        for (Index s = from; s < to; ++s) {
          const Real probability = exponential(visible[s] - normalizer);
          const Real factor = words[s - from] >= threshold ? keep_scale : Real(0);
          visible[s] = probability * factor;
          dvisible[s] = probability * (dvisible[s] * factor - dot);
        }
      });
    }
    clear_outside(row, begin, end, part.columns);
    clear_outside(drow, begin, end, part.columns);
  }
}

template <class Real>
void attention_backward(const AttentionHead<Real>& head) {
  const HeadBuffers<Real> buffers(head.sequence, head.head_size, head.scratch);
  const Index channels = buffers.channels, stride = buffers.strip_stride;
  transpose_into_panels(head.k, head.qkv_stride, head.sequence, head.head_size, buffers.k_panels);
  transpose_into_panels(head.v, head.qkv_stride, head.sequence, head.head_size, buffers.v_panels);
  copy_rows(head.k, head.qkv_stride, head.sequence, head.head_size, channels, Real(1), buffers.k);
  for (Index i = 0; i < head.sequence * channels; ++i) buffers.dk[i] = buffers.dv[i] = Real(0);
  for (Index first = 0; first < head.sequence; first += kQueries) {
    const Tile part = make_tile(head, first);
    const Index visible = part.end - part.begin, offset = part.begin - part.panel * kTileColumns<Real>;
    copy_rows(head.q + first * head.qkv_stride, head.qkv_stride, part.rows, head.head_size, channels, head.scale, buffers.query);
    copy_rows(head.dout + first * head.out_stride, head.out_stride, part.rows, head.head_size, channels, Real(1), buffers.dout);
    strip_product(part, head.head_size, buffers.query, channels, buffers.k_panels, buffers.scores, stride);
    strip_product(part, head.head_size, buffers.dout, channels, buffers.v_panels, buffers.dscores, stride);
    softmax_backward_tile(head, part, buffers.scores, buffers.dscores, stride);
    padded_gemm(part.rows, channels, visible, buffers.dscores + offset, stride, Index{1}, buffers.k + part.begin * channels,
                channels, buffers.out, channels, false);
    store_rows(buffers.out, channels, part.rows, head.head_size, head.scale, head.dq + first * head.qkv_stride, head.qkv_stride);
    // The query carries the factor scale already.
    padded_gemm(visible, channels, part.rows, buffers.dscores + offset, Index{1}, stride, buffers.query, channels,
                buffers.dk + part.begin * channels, channels, true);
    padded_gemm(visible, channels, part.rows, buffers.scores + offset, Index{1}, stride, buffers.dout, channels,
                buffers.dv + part.begin * channels, channels, true);
  }
  store_rows(buffers.dk, channels, head.sequence, head.head_size, Real(1), head.dk, head.qkv_stride);
  store_rows(buffers.dv, channels, head.sequence, head.head_size, Real(1), head.dv, head.qkv_stride);
}

template <class Real>
void attention_decode(const Real* q, const Real* keys, const Real* values, Index length, Index stride, Index head_size,
                      Real scale, Real* weights, Real* out) {
  for (Index s = 0; s < length; ++s) {
    const Real* key = keys + s * stride;
    Real dot = 0;
#pragma omp simd reduction(+ : dot)
    for (Index c = 0; c < head_size; ++c) dot += q[c] * key[c];
    weights[s] = dot * scale;
  }
  const double sum = exponential_sum<true>(weights, length, maximum(weights, length));
  const Real inverse = static_cast<Real>(1.0 / sum);
  for (Index c = 0; c < head_size; ++c) out[c] = Real(0);
  for (Index s = 0; s < length; ++s) {
    const Real* value = values + s * stride;
    const Real weight = weights[s] * inverse;
#pragma omp simd
    for (Index c = 0; c < head_size; ++c) out[c] += weight * value[c];
  }
}

}  // namespace
}  // namespace tandem::cpu

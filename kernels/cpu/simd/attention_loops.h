// SPDX-License-Identifier: Apache-2.0
// Attention of one (row, head), or of a segment of it, queries in tiles of kQueries. The scores of a tile against all keys that
// it sees are one strip [kQueries, keys], made, used and overwritten by the next tile: no [sequence, sequence] matrix exists.
// Keys and values are copied once into contiguous buffers padded to whole registers, so that every product is a padded_gemm().
#pragma once

#include "kernels/cpu/simd/attention_buffers.h"
#include "kernels/cpu/simd/gemm_loops.h"
#include "kernels/cpu/simd/random_loops.h"
#include "kernels/cpu/simd/training_loops.h"
#include "kernels/cpu/simd/vector_math.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {
namespace {

/// The queries of one tile and the keys that they see together.
struct Tile {
  Index first, rows;     // queries [first, first + rows)
  Index begin, end;      // keys that some query of the tile sees; empty: begin == end
  Index panel, columns;  // what the strip holds: keys [panel * kTileColumns, ... + columns), columns in whole panels
};

struct Range {  // [begin, end)
  Index begin, end;
};

/// The keys that a query sees, as indices into head.k; begin == end where there are none.
template <class Real>
inline Range visible_keys(const AttentionHead<Real>& head, Index query) {
  const Index start = (head.document_starts == nullptr ? 0 : head.document_starts[query]) - head.key_begin;
  const Index stop = head.query_begin + query + 1 - head.key_begin;
  const Index begin = start < 0 ? 0 : start;
  const Index end = stop < head.keys ? stop : head.keys;
  return {begin, end < begin ? begin : end};
}

template <class Real>
inline Tile make_tile(const AttentionHead<Real>& head, Index first) {
  Tile result;
  result.first = first;
  result.rows = head.queries - first < kQueries ? head.queries - first : kQueries;
  result.begin = head.keys;
  result.end = 0;
  for (Index t = first; t < first + result.rows; ++t) {
    const Range visible = visible_keys(head, t);
    if (visible.begin == visible.end) continue;
    result.begin = visible.begin < result.begin ? visible.begin : result.begin;
    result.end = visible.end > result.end ? visible.end : result.end;
  }
  if (result.end == 0) result.begin = 0;
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

/// Keeps logsumexp of one query whose scores have this maximum and sum of e^(score - largest). Returns the factor that turns
/// these terms into probabilities; `carry` is what the output over earlier keys is multiplied by.
template <class Real>
inline Real keep_logsumexp(const AttentionHead<Real>& head, Index query, Real largest, double sum, Real& carry) {
  double total = static_cast<double>(largest) + __builtin_log(sum);
  double factor = 1.0 / sum;
  carry = Real(0);
  const double earlier = static_cast<double>(head.logsumexp[query]);
  if (head.accumulate && earlier != -__builtin_inf()) {
    // In terms of the smaller over the larger part. Unrounded logarithms, so that both shares add up to one.
    const bool grows = total > earlier;
    const double ratio = __builtin_exp(grows ? earlier - total : total - earlier), share = 1.0 / (1.0 + ratio);
    carry = static_cast<Real>(grows ? ratio * share : share);
    factor *= grows ? share : ratio * share;
    total = (grows ? total : earlier) + __builtin_log1p(ratio);
  }
  head.logsumexp[query] = static_cast<Real>(total);
  return static_cast<Real>(factor);
}

/// Scores of a tile become (dropped) probabilities, and logsumexp is kept.
template <class Real>
inline void softmax_tile(const AttentionHead<Real>& head, const Tile& part, Real* scores, Index stride, Real* carry) {
  const Index origin = part.panel * kTileColumns<Real>;
  for (Index t = part.first; t < part.first + part.rows; ++t) {
    Real* row = scores + (t - part.first) * stride;
    const Range visible = visible_keys(head, t);
    const Index begin = visible.begin - origin, end = visible.end - origin;
    if (begin == end) {
      carry[t - part.first] = Real(1);
      clear_outside(row, Index{0}, Index{0}, part.columns);
      continue;
    }
    const Real largest = maximum(row + begin, end - begin);
    const double sum = exponential_sum<true>(row + begin, end - begin, largest);
    const Real inverse = keep_logsumexp(head, t, largest, sum, carry[t - part.first]);
    if (head.mask == nullptr) {
#pragma omp simd
      for (Index s = begin; s < end; ++s) row[s] *= inverse;
    } else {
      const Real factor = inverse * head.keep_scale;
      const std::uint32_t threshold = head.mask->threshold;
      for_mask(*head.mask, mask_element(head, t, visible.begin), end - begin,
               [&](const std::uint32_t* words, Index from, Index to) {
                 Real* seen = row + begin;
#pragma omp simd
                 for (Index s = from; s < to; ++s) seen[s] = words[s - from] >= threshold ? seen[s] * factor : Real(0);
               });
    }
    clear_outside(row, begin, end, part.columns);
  }
}

template <class Real>
void attention_forward(const AttentionHead<Real>& head) {
  const HeadBuffers<Real> buffers(head.keys, head.head_size, head.scratch);
  const Index channels = buffers.channels;
  Real carry[kQueries];
  transpose_into_panels(head.k, head.k_stride, head.keys, head.head_size, buffers.k_panels);
  copy_rows(head.v, head.v_stride, head.keys, head.head_size, channels, Real(1), buffers.v);
  for (Index first = 0; first < head.queries; first += kQueries) {
    const Tile part = make_tile(head, first);
    if (part.begin == part.end) continue;
    const Index origin = part.panel * kTileColumns<Real>;
    copy_rows(head.q + first * head.q_stride, head.q_stride, part.rows, head.head_size, channels, head.scale, buffers.query);
    strip_product(part, head.head_size, buffers.query, channels, buffers.k_panels, buffers.scores, buffers.strip_stride);
    softmax_tile(head, part, buffers.scores, buffers.strip_stride, carry);
    padded_gemm(part.rows, channels, part.end - part.begin, buffers.scores + (part.begin - origin), buffers.strip_stride,
                Index{1}, buffers.v + part.begin * channels, channels, buffers.out, channels, false);
    Real* out = head.out + first * head.out_stride;
    if (head.accumulate) {
      merge_rows(buffers.out, channels, part.rows, head.head_size, carry, out, head.out_stride);
    } else {
      store_rows(buffers.out, channels, part.rows, head.head_size, Real(1), false, out, head.out_stride);
    }
  }
}

/// In place: scores become (dropped) probabilities P~, dscores (dP~ on entry) become P (dP - D), D = sum(dout * out).
template <class Real>
inline void softmax_backward_tile(const AttentionHead<Real>& head, const Tile& part, Real* scores, Real* dscores, Index stride) {
  const Index origin = part.panel * kTileColumns<Real>;
  for (Index t = part.first; t < part.first + part.rows; ++t) {
    const Range visible = visible_keys(head, t);
    const Index begin = visible.begin - origin, end = visible.end - origin;
    Real* row = scores + (t - part.first) * stride;
    Real* drow = dscores + (t - part.first) * stride;
    if (begin == end) {
      clear_outside(row, Index{0}, Index{0}, part.columns);
      clear_outside(drow, Index{0}, Index{0}, part.columns);
      continue;
    }
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
      for_mask(*head.mask, mask_element(head, t, visible.begin), end - begin,
               [&](const std::uint32_t* words, Index from, Index to) {
                 Real *seen = row + begin, *dseen = drow + begin;
#pragma omp simd
                 for (Index s = from; s < to; ++s) {
                   const Real probability = exponential(seen[s] - normalizer);
                   const Real factor = words[s - from] >= threshold ? keep_scale : Real(0);
                   seen[s] = probability * factor;
                   dseen[s] = probability * (dseen[s] * factor - dot);
                 }
               });
    }
    clear_outside(row, begin, end, part.columns);
    clear_outside(drow, begin, end, part.columns);
  }
}

template <class Real>
void attention_backward(const AttentionHead<Real>& head) {
  const HeadBuffers<Real> buffers(head.keys, head.head_size, head.scratch);
  const Index channels = buffers.channels, stride = buffers.strip_stride;
  transpose_into_panels(head.k, head.k_stride, head.keys, head.head_size, buffers.k_panels);
  transpose_into_panels(head.v, head.v_stride, head.keys, head.head_size, buffers.v_panels);
  copy_rows(head.k, head.k_stride, head.keys, head.head_size, channels, Real(1), buffers.k);
  for (Index i = 0; i < head.keys * channels; ++i) buffers.dk[i] = buffers.dv[i] = Real(0);
  for (Index first = 0; first < head.queries; first += kQueries) {
    const Tile part = make_tile(head, first);
    if (part.begin == part.end) continue;
    const Index visible = part.end - part.begin, offset = part.begin - part.panel * kTileColumns<Real>;
    copy_rows(head.q + first * head.q_stride, head.q_stride, part.rows, head.head_size, channels, head.scale, buffers.query);
    copy_rows(head.dout + first * head.out_stride, head.out_stride, part.rows, head.head_size, channels, Real(1), buffers.dout);
    strip_product(part, head.head_size, buffers.query, channels, buffers.k_panels, buffers.scores, stride);
    strip_product(part, head.head_size, buffers.dout, channels, buffers.v_panels, buffers.dscores, stride);
    softmax_backward_tile(head, part, buffers.scores, buffers.dscores, stride);
    padded_gemm(part.rows, channels, visible, buffers.dscores + offset, stride, Index{1}, buffers.k + part.begin * channels,
                channels, buffers.out, channels, false);
    store_rows(buffers.out, channels, part.rows, head.head_size, head.scale, head.accumulate, head.dq + first * head.dq_stride,
               head.dq_stride);
    // The query carries the factor scale already.
    padded_gemm(visible, channels, part.rows, buffers.dscores + offset, Index{1}, stride, buffers.query, channels,
                buffers.dk + part.begin * channels, channels, true);
    padded_gemm(visible, channels, part.rows, buffers.scores + offset, Index{1}, stride, buffers.dout, channels,
                buffers.dv + part.begin * channels, channels, true);
  }
  store_rows(buffers.dk, channels, head.keys, head.head_size, Real(1), head.accumulate, head.dk, head.dk_stride);
  store_rows(buffers.dv, channels, head.keys, head.head_size, Real(1), head.accumulate, head.dv, head.dv_stride);
}

template <class Real>
void softmax_gradient(const Real* probability, Real scale, Real* gradient, Index count) {
  Real dot = 0;
#pragma omp simd reduction(+ : dot)
  for (Index s = 0; s < count; ++s) dot += probability[s] * gradient[s];
#pragma omp simd
  for (Index s = 0; s < count; ++s) gradient[s] = scale * probability[s] * (gradient[s] - dot);
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

// SPDX-License-Identifier: Apache-2.0
// Attention that keeps its probabilities. Queries in tiles: a tile's strips [kTile, keys] are in fp32 or fp64 while it is worked
// on, and pass to and from the kept matrix, whose elements may be 16 bits wide.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cpu/cpu_attention.h"

namespace tandem::cpu {
namespace {

constexpr std::int64_t kTile = 64;  // queries
constexpr std::int64_t kStrips = 3;

template <class Real>
const VectorOps<Real>& ops_of(const VectorTables& tables) {
  if constexpr (std::is_same_v<Real, float>) {
    return tables.f32;
  } else {
    return tables.f64;
  }
}

/// One tile of queries and the keys [begin, end) that one of them sees.
struct Tile {
  std::int64_t first, rows, begin, end;
};

template <class Real>
class Materialized {
 public:
  Materialized(const VectorTables& tables, const AttentionHead<Real>& head, DType dtype, void* probabilities)
      : tables_(tables),
        ops_(ops_of<Real>(tables)),
        head_(head),
        dtype_(dtype),
        kept_(static_cast<std::byte*>(probabilities)),
        keys_(head.keys),
        strip_(head.scratch),
        dropped_(strip_ + kTile * keys_),
        gradient_(dropped_ + kTile * keys_) {}

  void forward(std::int64_t first) const;
  void backward(std::int64_t first) const;
  void clear(Real* rows, std::int64_t stride) const {
    for (std::int64_t t = 0; t < keys_; ++t) std::fill_n(rows + t * stride, head_.head_size, Real(0));
  }

 private:
  [[nodiscard]] std::int64_t start(std::int64_t query) const {
    return head_.document_starts == nullptr ? 0 : head_.document_starts[query];
  }
  [[nodiscard]] Tile tile(std::int64_t first) const {
    Tile result{first, std::min(kTile, head_.queries - first), first, 0};
    result.end = first + result.rows;
    for (std::int64_t t = first; t < result.end; ++t) result.begin = std::min(result.begin, start(t));
    return result;
  }
  [[nodiscard]] Real* row(Real* strip, const Tile& part, std::int64_t query) const {
    return strip + (query - part.first) * keys_;
  }
  [[nodiscard]] std::byte* kept_row(std::int64_t query) const {
    return kept_ + query * keys_ * static_cast<std::int64_t>(size_bytes(dtype_));
  }

  void softmax(Real* scores, std::int64_t query) const;
  void keep(std::int64_t query, Real* probabilities) const;
  void load(std::int64_t query, Real* probabilities) const;
  void drop(std::int64_t query, Real* seen) const;
  /// strip = left times right^T, over the channels, for the keys of the tile.
  void channel_product(const Tile& part, const Real* left, std::int64_t left_stride, const Real* right, std::int64_t right_stride,
                       Real* strip) const {
    ops_.gemm(part.rows, part.end - part.begin, head_.head_size, left + part.first * left_stride, left_stride, 1,
              right + part.begin * right_stride, 1, right_stride, strip + part.begin, keys_, false);
  }
  /// Rows of the tile's queries = strip times the keys' rows.
  void key_product(const Tile& part, const Real* strip, const Real* right, std::int64_t right_stride, Real* to,
                   std::int64_t to_stride) const {
    ops_.gemm(part.rows, head_.head_size, part.end - part.begin, strip + part.begin, keys_, 1, right + part.begin * right_stride,
              right_stride, 1, to + part.first * to_stride, to_stride, false);
  }
  /// Rows of the tile's keys += strip^T times the queries' rows.
  void query_product(const Tile& part, const Real* strip, const Real* right, std::int64_t right_stride, Real* to,
                     std::int64_t to_stride) const {
    ops_.gemm(part.end - part.begin, head_.head_size, part.rows, strip + part.begin, 1, keys_, right + part.first * right_stride,
              right_stride, 1, to + part.begin * to_stride, to_stride, true);
  }

  const VectorTables& tables_;
  const VectorOps<Real>& ops_;
  const AttentionHead<Real>& head_;
  DType dtype_;
  std::byte* kept_;
  std::int64_t keys_;
  Real *strip_, *dropped_, *gradient_;
};

/// Scores of one query, not scaled yet, become probabilities; 0 where it sees no key.
template <class Real>
void Materialized<Real>::softmax(Real* scores, std::int64_t query) const {
  const std::int64_t begin = start(query), count = query + 1 - begin;
  Real* seen = scores + begin;
  ops_.scale(seen, head_.scale, count);
  Real statistics[2];
  ops_.softmax_statistics(seen, count, statistics);
  const double logsumexp = static_cast<double>(statistics[0]) + std::log(static_cast<double>(statistics[1]));
  ops_.softmax_scaled(seen, count, static_cast<Real>(logsumexp), Real(1));
  std::fill(scores, seen, Real(0));
  std::fill(seen + count, scores + keys_, Real(0));
}

/// Stores a row; what is used further is what was stored.
template <class Real>
void Materialized<Real>::keep(std::int64_t query, Real* probabilities) const {
  if constexpr (std::is_same_v<Real, float>) {
    narrow(tables_, probabilities, dtype_, kept_row(query), keys_);
    if (is_16bit(dtype_)) widen(tables_, kept_row(query), dtype_, probabilities, keys_);
  } else {
    std::copy_n(probabilities, keys_, reinterpret_cast<Real*>(kept_row(query)));
  }
}

template <class Real>
void Materialized<Real>::load(std::int64_t query, Real* probabilities) const {
  if constexpr (std::is_same_v<Real, float>) {
    widen(tables_, kept_row(query), dtype_, probabilities, keys_);
  } else {
    std::copy_n(reinterpret_cast<const Real*>(kept_row(query)), keys_, probabilities);
  }
}

/// Applies the mask of one query to what belongs to the keys that it sees.
template <class Real>
void Materialized<Real>::drop(std::int64_t query, Real* seen) const {
  if (head_.mask == nullptr) return;
  const std::int64_t begin = start(query);
  const auto element = head_.mask_first_element + static_cast<std::uint64_t>(query * head_.mask_row_elements + begin);
  ops_.dropout(*head_.mask, element, head_.keep_scale, seen, nullptr, seen, query + 1 - begin);
}

template <class Real>
void Materialized<Real>::forward(std::int64_t first) const {
  const Tile part = tile(first);
  channel_product(part, head_.q, head_.q_stride, head_.k, head_.k_stride, strip_);
  for (std::int64_t t = first; t < part.end; ++t) {
    Real* probabilities = row(strip_, part, t);
    softmax(probabilities, t);
    keep(t, probabilities);
    drop(t, probabilities + start(t));
  }
  key_product(part, strip_, head_.v, head_.v_stride, head_.out, head_.out_stride);
}

template <class Real>
void Materialized<Real>::backward(std::int64_t first) const {
  const Tile part = tile(first);
  channel_product(part, head_.dout, head_.out_stride, head_.v, head_.v_stride, gradient_);
  for (std::int64_t t = first; t < part.end; ++t) {
    const std::int64_t begin = start(t), count = t + 1 - begin;
    Real *probabilities = row(strip_, part, t), *dropped = row(dropped_, part, t), *gradient = row(gradient_, part, t);
    load(t, probabilities);
    std::copy(probabilities + part.begin, probabilities + part.end, dropped + part.begin);
    drop(t, dropped + begin);
    drop(t, gradient + begin);
    ops_.softmax_gradient(probabilities + begin, head_.scale, gradient + begin, count);
    std::fill(gradient + part.begin, gradient + begin, Real(0));
    std::fill(gradient + begin + count, gradient + part.end, Real(0));
  }
  query_product(part, dropped_, head_.dout, head_.out_stride, head_.dv, head_.dv_stride);
  query_product(part, gradient_, head_.q, head_.q_stride, head_.dk, head_.dk_stride);
  key_product(part, gradient_, head_.k, head_.k_stride, head_.dq, head_.dq_stride);
}

}  // namespace

std::int64_t materialized_scratch(const AttentionCall& call) { return kStrips * kTile * call.segment.keys; }

template <class Real>
void materialized_forward(const VectorTables& tables, const AttentionHead<Real>& head, DType dtype, void* probabilities) {
  const Materialized<Real> work(tables, head, dtype, probabilities);
  for (std::int64_t first = 0; first < head.queries; first += kTile) work.forward(first);
}

template <class Real>
void materialized_backward(const VectorTables& tables, const AttentionHead<Real>& head, DType dtype, const void* probabilities) {
  // Only read.
  const Materialized<Real> work(tables, head, dtype, const_cast<void*>(probabilities));
  work.clear(head.dk, head.dk_stride);
  work.clear(head.dv, head.dv_stride);
  for (std::int64_t first = 0; first < head.queries; first += kTile) work.backward(first);
}

template void materialized_forward<float>(const VectorTables&, const AttentionHead<float>&, DType, void*);
template void materialized_forward<double>(const VectorTables&, const AttentionHead<double>&, DType, void*);
template void materialized_backward<float>(const VectorTables&, const AttentionHead<float>&, DType, const void*);
template void materialized_backward<double>(const VectorTables&, const AttentionHead<double>&, DType, const void*);

}  // namespace tandem::cpu

// SPDX-License-Identifier: Apache-2.0
// Attention of any dtype and head size, forward: a block works on a tile of queries of one (row, head), tiles of keys follow each
// other, softmax is rescaled as they come (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
#include "kernels/cuda/attention_plain.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kTiles = 3, kStrips = 1, kLines = 3;
/// Where a block keeps its tiles, strip and lines.
template <class Real, int kTile>
struct ForwardShared {
  Real *query, *keys, *out, *strip, *largest, *sum, *rescale;
  __device__ ForwardShared(Real* memory, int head_size) {
    const int tile = kTile * tile_stride(head_size);
    query = memory;
    keys = query + tile;  // then values
    out = keys + tile;
    strip = out + tile;
    largest = strip + PlainBlock<kTile>::kStrip;
    sum = largest + kTile;
    rescale = sum + kTile;
  }
};

/// Scores become e^(score - largest), dropped; the lines follow. kTile / 4 threads share a row.
template <class Real, int kTile>
__device__ void softmax_rows(const ForwardShared<Real, kTile>& shared, const AttentionWork& work, std::uint64_t head_element,
                             int first_query, int first_key) {
  constexpr int kShare = kTile / 4;
  const int r = static_cast<int>(threadIdx.x) / kShare, part = static_cast<int>(threadIdx.x) % kShare;
  Real* scores = shared.strip + r * (kTile + 1);
  const Real before = shared.largest[r];
  Real largest = before;
  for (int k = part; k < kTile; k += kShare) largest = larger_of(scores[k], largest);
  largest = reduce_row<kTile>(largest, [](Real a, Real b) { return larger_of(a, b); });
  // Of a query that has seen no key yet: any finite number makes all its powers 0.
  const Real origin = largest == -static_cast<Real>(INFINITY) ? Real(0) : largest;
  Real sum = 0;
  for (int k = part; k < kTile; k += kShare) {
    const Real power = std::exp(scores[k] - origin);
    sum += power;
    scores[k] = power * mask_factor<Real>(work, head_element, first_query + r, first_key + k);
  }
  sum = reduce_row<kTile>(sum, [](Real a, Real b) { return a + b; });
  if (part != 0) return;
  const Real rescale = std::exp(before - origin);
  shared.rescale[r] = rescale;
  shared.largest[r] = largest;
  shared.sum[r] = shared.sum[r] * rescale + sum;
}

template <class T, int kTile>
__device__ void store_queries(const ForwardShared<Wide<T>, kTile>& shared, const AttentionWork& work, int row, int head,
                              int first_query) {
  using Real = Wide<T>;
  const PlainBlock<kTile> at;
  auto* logsumexp = static_cast<Real*>(work.logsumexp) + statistic_index(work, row, head, 0);
  const int r = static_cast<int>(threadIdx.x);
  if (r < kTile && first_query + r < work.queries && shared.sum[r] != 0) {
    const Real total = shared.largest[r] + std::log(shared.sum[r]);
    Merged<Real> merged = {0, 1, total};
    if (work.accumulate) merged = merge(logsumexp[first_query + r], total);
    logsumexp[first_query + r] = merged.logsumexp;
    shared.largest[r] = merged.factor / shared.sum[r];
    shared.rescale[r] = merged.carry;
  }
  __syncthreads();
  for (int y = at.y; y < kTile && first_query + y < work.queries; y += at.kHalf) {
    if (shared.sum[y] == 0) continue;  // sees none of these keys
    const std::int64_t index = operand_index(work, work.out, row, head, first_query + y);
    const Real* out = shared.out + y * tile_stride(work.head_size);
    for (int c = at.x; c < work.head_size; c += at.kHalf) {
      store_result<T>(work, work.out, index + c, shared.largest[y] * out[c], shared.rescale[y]);
    }
  }
}

template <class T, int kTile>
__global__ void __launch_bounds__(PlainBlock<kTile>::kThreads) forward_kernel(const AttentionWork work) {
  using Real = Wide<T>;
  GPU_DYNAMIC_SHARED(Real, memory);
  const ForwardShared<Real, kTile> shared(memory, work.head_size);
  const int head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTile;  // those that see most go first
  const SeenKeys sees = tile_sight(work, row, first_query, kTile).some;
  if (sees.begin >= sees.end) return;
  const std::uint64_t head_element = first_mask_element(work, row, head);
  load_rows<T, kTile>(shared.query, work, work.query, row, head, first_query, work.queries);
  clear_rows<Real, kTile>(shared.out, work.head_size);
  if (threadIdx.x < kTile) {
    shared.largest[threadIdx.x] = -static_cast<Real>(INFINITY);
    shared.sum[threadIdx.x] = 0;
  }
  for (int first_key = sees.begin / kTile * kTile; first_key < sees.end; first_key += kTile) {
    __syncthreads();  // the values of the tile before are done with
    load_rows<T, kTile>(shared.keys, work, work.key, row, head, first_key, work.keys);
    __syncthreads();
    score_strip<Real, kTile>(shared.strip, work, shared.query, shared.keys, row, first_query, first_key);
    __syncthreads();  // scores are there, keys are done with
    load_rows<T, kTile>(shared.keys, work, work.value, row, head, first_key, work.keys);
    softmax_rows<Real, kTile>(shared, work, head_element, first_query, first_key);
    __syncthreads();
    add_rows<Strip::plain, Real, kTile>(shared.out, shared.rescale, shared.strip, shared.keys, work.head_size);
  }
  __syncthreads();
  store_queries<T, kTile>(shared, work, row, head, first_query);
}

}  // namespace

void launch_attention_forward(const AttentionWork& work, StreamHandle stream) {
  with_storage(work.dtype, [&]<class T>(T) {
    with_plain_tile<Wide<T>>(work, kTiles, kStrips, kLines, [&](auto size, int bytes) {
      constexpr int kTile = decltype(size)::value;
      const dim3 grid = tile_grid(work, work.queries, kTile);
      launch(forward_kernel<T, kTile>, grid, dim3(PlainBlock<kTile>::kThreads), bytes, stream, work);
    });
  });
}

}  // namespace tandem::TANDEM_GPU

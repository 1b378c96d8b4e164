// SPDX-License-Identifier: Apache-2.0
// The k largest magnitudes. Their bits are looked for in three digits of 11, 10 and 10 bits: a histogram of one digit, over the
// elements that have the digits before it, says which value the k-th largest has there. Then tiles count what they have above and
// at the threshold, sums over tiles say where their elements go, and each tile writes its own: indices ascend. All counts are
// whole numbers, so that no order of additions shows.
#include <bit>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/compression_device.cuh"
#include "kernels/cuda/compression_kernels.h"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kThreads = 256;
constexpr int kBins = 2048;
constexpr int kEach = static_cast<int>(kTopKTile) / kThreads;  // neighbouring elements of a thread
constexpr int kScanThreads = 1024;

struct Digit {
  int histogram;
  int shift, bits;
};
constexpr Digit kDigits[3] = {{0, 20, 11}, {1, 10, 10}, {2, 0, 10}};

/// Whether the digits before `digit`, which is not the first, are those found.
__device__ inline bool has_prefix(std::int32_t magnitude, std::int32_t prefix, const Digit& digit) {
  const int above = digit.shift + digit.bits;
  return magnitude >> above == prefix >> above;
}

/// Sum of `value` over the threads before this one.
__device__ inline std::int32_t scan_before(std::int32_t value) {
  __shared__ std::int32_t of_warps[kWarpSize];
  std::int32_t up_to = value;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const std::int32_t before = __shfl_sync(kFullMask, up_to, lane_index() >= distance ? lane_index() - distance : 0);
    if (lane_index() >= distance) up_to += before;
  }
  if (lane_index() == kWarpSize - 1) of_warps[warp_index()] = up_to;
  __syncthreads();
  std::int32_t warps_before = 0;
  for (int w = 0; w < warp_index(); ++w) warps_before += of_warps[w];
  __syncthreads();  // before the next call writes of_warps
  return warps_before + up_to - value;
}

/// Adds the block's histogram to that of all blocks.
__device__ inline void add_histogram(const std::int32_t* own, std::int32_t* all, int bins) {
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < bins; bin += kThreads) {
    if (own[bin] != 0) atomicAdd(&all[bin], own[bin]);
  }
}

__global__ void __launch_bounds__(kThreads) form_kernel(CodeArrays arrays, Digit digit, TopKState* state) {
  __shared__ std::int32_t counts[kBins];
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) counts[bin] = 0;
  __syncthreads();
  const std::int64_t begin = blockIdx.x * kTopKTile;
  for (std::int64_t i = begin + threadIdx.x * 4; i < begin + kTopKTile && i < arrays.elements; i += kThreads * 4) {
    float c[4];
    const int here = load_corrected(arrays, i, arrays.elements - i, c);
    for (int j = 0; j < here; ++j) {
      const std::int32_t magnitude = magnitude_bits(c[j]);
      if (magnitude >= kInfinityBits) *arrays.refused = 1;
      atomicAdd(&counts[magnitude >> digit.shift], 1);
    }
    if (arrays.new_residual != nullptr) store_floats(arrays.new_residual + i, c, here);
  }
  add_histogram(counts, state->histograms[digit.histogram], kBins);
}

__global__ void __launch_bounds__(kThreads)
    histogram_kernel(const float* c, std::int64_t elements, Digit digit, TopKState* state) {
  __shared__ std::int32_t counts[kBins];
  const int bins = 1 << digit.bits;
  for (int bin = static_cast<int>(threadIdx.x); bin < bins; bin += kThreads) counts[bin] = 0;
  __syncthreads();
  const std::int32_t prefix = state->threshold_bits;
  const std::int64_t begin = blockIdx.x * kTopKTile;
  for (std::int64_t i = begin + threadIdx.x; i < begin + kTopKTile && i < elements; i += kThreads) {
    const std::int32_t magnitude = magnitude_bits(c[i]);
    if (has_prefix(magnitude, prefix, digit)) atomicAdd(&counts[magnitude >> digit.shift & (bins - 1)], 1);
  }
  add_histogram(counts, state->histograms[digit.histogram], bins);
}

/// One block. Thread t has a run of bins, thread 0 the highest.
__global__ void __launch_bounds__(kThreads) choose_kernel(Digit digit, TopKState* state) {
  const int bins = 1 << digit.bits, each = bins / kThreads;
  const std::int32_t* const counts = state->histograms[digit.histogram];
  const int highest = bins - 1 - static_cast<int>(threadIdx.x) * each;
  std::int32_t own = 0;
  for (int b = 0; b < each; ++b) own += counts[highest - b];
  const std::int32_t wanted = state->wanted;  // read by all before one writes it, behind the barriers of the scan
  std::int32_t above = scan_before(own);
  if (wanted <= above || wanted > above + own) return;
  for (int b = 0; b < each; ++b) {
    const std::int32_t count = counts[highest - b];
    if (wanted <= above + count) {
      state->threshold_bits |= (highest - b) << digit.shift;
      state->wanted = wanted - above;
      return;
    }
    above += count;
  }
}

/// What a thread's neighbours are of the tile: bit j of `above` and `equal`.
struct Marks {
  std::int64_t first;
  std::uint32_t above = 0, equal = 0;

  __device__ Marks(const float* c, std::int64_t elements, std::int32_t threshold)
      : first(blockIdx.x * kTopKTile + static_cast<std::int64_t>(threadIdx.x) * kEach) {
    for (int j = 0; j < kEach; ++j) {
      const std::int32_t magnitude = first + j < elements ? magnitude_bits(c[first + j]) : -1;
      above |= static_cast<std::uint32_t>(magnitude > threshold) << j;
      equal |= static_cast<std::uint32_t>(magnitude == threshold) << j;
    }
  }
  __device__ static std::int32_t count(std::uint32_t bits) {
    std::int32_t ones = 0;
    for (int j = 0; j < kEach; ++j) ones += static_cast<std::int32_t>(bits >> j & 1U);
    return ones;
  }
};

__global__ void __launch_bounds__(kThreads)
    count_kernel(const float* c, std::int64_t elements, const TopKState* state, TopKTiles tiles) {
  const Marks marks(c, elements, state->threshold_bits);
  const std::int32_t above = block_sum(Marks::count(marks.above)), equal = block_sum(Marks::count(marks.equal));
  if (threadIdx.x == 0) {
    tiles.above[blockIdx.x] = above;
    tiles.equal[blockIdx.x] = equal;
  }
}

/// Counts become sums of the counts before.
__device__ inline void sum_before(std::int32_t* counts, std::int32_t num_counts) {
  const std::int32_t run = (num_counts + kScanThreads - 1) / kScanThreads, begin = static_cast<std::int32_t>(threadIdx.x) * run;
  const std::int32_t end = begin + run < num_counts ? begin + run : num_counts;
  std::int32_t own = 0;
  for (std::int32_t i = begin; i < end; ++i) own += counts[i];
  std::int32_t before = scan_before(own);
  for (std::int32_t i = begin; i < end; ++i) {
    const std::int32_t count = counts[i];
    counts[i] = before;
    before += count;
  }
}

/// One block.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(std::int32_t num_tiles, TopKTiles tiles) {
  sum_before(tiles.above, num_tiles);
  sum_before(tiles.equal, num_tiles);
}

__global__ void __launch_bounds__(kThreads)
    take_kernel(const float* c, std::int64_t elements, std::int64_t k, const TopKState* state, TopKTiles tiles,
                std::byte* payload, float* new_residual) {
  const std::int32_t wanted = state->wanted;
  const Marks marks(c, elements, state->threshold_bits);
  std::int32_t above = tiles.above[blockIdx.x] + scan_before(Marks::count(marks.above));
  std::int32_t equal = tiles.equal[blockIdx.x] + scan_before(Marks::count(marks.equal));
  for (int j = 0; j < kEach; ++j) {
    const bool is_above = (marks.above >> j & 1U) != 0, is_equal = (marks.equal >> j & 1U) != 0;
    if (is_above || (is_equal && equal < wanted)) {
      const std::int64_t place = above + (equal < wanted ? equal : wanted), i = marks.first + j;
      const float value = c[i];
      store_word(payload + 4 * place, static_cast<std::uint32_t>(i));
      store_word(payload + 4 * (k + place), std::bit_cast<std::uint32_t>(value));
      if (new_residual != nullptr) new_residual[i] = 0.0F;
    }
    above += is_above ? 1 : 0;
    equal += is_equal ? 1 : 0;
  }
}

__global__ void __launch_bounds__(kThreads) scatter_kernel(std::int64_t k, const std::byte* payload, Decode decode, float* out,
                                                           std::int64_t elements, std::int32_t* refused) {
  const std::int64_t place = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  if (place >= k) return;
  const auto i = static_cast<std::int32_t>(load_word(payload + 4 * place));
  if (i < 0 || i >= elements) {
    *refused = 1;
    return;
  }
  const float value = std::bit_cast<float>(load_word(payload + 4 * (k + place)));
  out[i] = decode == Decode::accumulate ? out[i] + value : value;
}

dim3 tiles_of(std::int64_t elements) { return dim3(static_cast<unsigned>((elements + kTopKTile - 1) / kTopKTile)); }

}  // namespace

void launch_form(const CodeArrays& arrays, TopKState* state, StreamHandle stream) {
  launch(form_kernel, tiles_of(arrays.elements), dim3(kThreads), 0, stream, arrays, kDigits[0], state);
}

void launch_find_threshold(const float* c, std::int64_t elements, TopKState* state, StreamHandle stream) {
  for (const Digit& digit : kDigits) {
    if (digit.histogram > 0) launch(histogram_kernel, tiles_of(elements), dim3(kThreads), 0, stream, c, elements, digit, state);
    launch(choose_kernel, dim3(1), dim3(kThreads), 0, stream, digit, state);
  }
}

void launch_take(const float* c, std::int64_t elements, std::int64_t k, const TopKState* state, const TopKTiles& tiles,
                 std::byte* payload, float* new_residual, StreamHandle stream) {
  const dim3 grid = tiles_of(elements);
  launch(count_kernel, grid, dim3(kThreads), 0, stream, c, elements, state, tiles);
  launch(scan_kernel, dim3(1), dim3(kScanThreads), 0, stream, static_cast<std::int32_t>(grid.x), tiles);
  launch(take_kernel, grid, dim3(kThreads), 0, stream, c, elements, k, state, tiles, payload, new_residual);
}

void launch_scatter(std::int64_t k, const std::byte* payload, Decode decode, float* out, std::int64_t elements,
                    std::int32_t* refused, StreamHandle stream) {
  launch(scatter_kernel, dim3(static_cast<unsigned>((k + kThreads - 1) / kThreads)), dim3(kThreads), 0, stream, k, payload,
         decode, out, elements, refused);
}

}  // namespace tandem::TANDEM_GPU

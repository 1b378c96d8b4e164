// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/simt/block.h"

// The words of CUDA C++ that kernels here use, for the C++ compiler; another one comes with its first user. What takes a file and
// a line is a point where threads meet. NOLINTBEGIN(bugprone-reserved-identifier): the names are CUDA's.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__ __restrict
/// One for all threads of a block: blocks run in turn on one thread of the process. Poisoned before each (shared_variables.h).
#define __shared__ static thread_local
#define threadIdx (::tandem::simt_gpu::current_lane->index)
#define blockIdx (::tandem::simt_gpu::current_block->index)
#define blockDim (::tandem::simt_gpu::current_block->block)
#define gridDim (::tandem::simt_gpu::current_block->grid)
#define warpSize 32
// NOLINTNEXTLINE(bugprone-macro-parentheses): type is a type
#define GPU_DYNAMIC_SHARED(type, name)                                                                                           \
  type* const name = reinterpret_cast<type*>(::tandem::simt_gpu::current_block->dynamic_shared)

namespace tandem::simt_gpu {

/// Vector types with CUDA's alignment: a load or store of one is one access.
template <class T, int alignment>
struct alignas(alignment) Two {
  T x, y;
};
template <class T, int alignment>
struct alignas(alignment) Four {
  T x, y, z, w;
};
using int4 = Four<int, 16>;
using uint2 = Two<unsigned, 8>;
using uint4 = Four<unsigned, 16>;
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using std::max;
using std::min;

inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { meet_block(false, file, line); }
inline int __syncthreads_count(int holds, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return meet_block(holds != 0, file, line);
}
inline int __syncthreads_or(int holds, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return meet_block(holds != 0, file, line) > 0 ? 1 : 0;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFU, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  meet_warp(mask, nullptr, file, line);
}

inline unsigned __ballot_sync(unsigned mask, int holds, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return ballot(mask, holds != 0, file, line);
}

/// The value of lane `source` of the warp.
template <class T>
T shuffle(unsigned mask, T value, int source, const char* file, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles move 4 or 8 bytes");
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, source, file, line);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline int own_lane() { return static_cast<int>(current_lane->number & 31U); }
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
  return shuffle(mask, value, own_lane() / width * width + (source & (width - 1)), file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  const int lane = own_lane(), source = lane ^ bits;
  return shuffle(mask, value, source / width > lane / width ? lane : source, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width = 32, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
  const int lane = own_lane(), source = lane + distance;
  return shuffle(mask, value, source / width != lane / width ? lane : source, file, line);
}

/// *address = change(*address), as one step; returns what was there. Several blocks may run at once, in several queues.
template <class T, class Change>
T change_atomically(T* address, const Change& change) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  auto* const bits = reinterpret_cast<Bits*>(address);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(bits, &before, std::bit_cast<Bits>(static_cast<T>(change(std::bit_cast<T>(before)))), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return std::bit_cast<T>(before);
}
template <class T>
T atomicAdd(T* address, T value) {
  static_assert(std::is_integral_v<T>, "sums of floating-point numbers have a fixed order here");
  return change_atomically(address, [value](T before) { return static_cast<T>(before + value); });
}

}  // namespace tandem::simt_gpu
// NOLINTEND(bugprone-reserved-identifier)

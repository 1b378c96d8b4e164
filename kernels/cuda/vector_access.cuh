// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"

/// Accesses of 16 bytes, for kernels whose time is that of their memory traffic.
namespace tandem::TANDEM_GPU {

/// Elements of T in 16 bytes.
template <class T>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

/// Whether all addresses are multiples of 16. Null is.
template <class... Pointers>
[[nodiscard]] bool are_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

/// Neighbouring elements, in registers. Pairs of 16 bits stay in the words that they came in: by themselves each would take a
/// register.
template <class T, int count, bool in_words = sizeof(T) == 2 && count % 2 == 0>
struct Pack {
  T values[count];
  __device__ T get(int i) const { return values[i]; }
  __device__ void set(int i, T value) { values[i] = value; }
};
template <class T, int count>
struct Pack<T, count, true> {
  std::uint32_t words[count / 2];
  __device__ T get(int i) const { return T{static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16))}; }
  __device__ void set(int i, T value) {
    const std::uint32_t other = words[i / 2] & (i % 2 == 0 ? 0xFFFF0000U : 0xFFFFU);
    words[i / 2] = other | std::uint32_t{value.bits} << (i % 2 * 16);
  }
};

#ifndef TANDEM_SIMT
/// Both rounded, `low` in the lower half. NaN becomes some NaN.
__device__ __forceinline__ std::uint32_t rounded_pair(float low, float high, bf16) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ std::uint32_t rounded_pair(float low, float high, f16) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

/// `count` elements at `from`, by as few accesses of up to 16 bytes as hold them; `from` must be aligned to those.
template <int count, class T>
__device__ __forceinline__ Pack<T, count> load_pack(const T* from) {
  Pack<T, count> pack;
  constexpr int kBytes = count * static_cast<int>(sizeof(T));
#ifdef TANDEM_SIMT
  constexpr int kAlignment = kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : kBytes % 4 == 0 ? 4 : static_cast<int>(sizeof(T));
  if (reinterpret_cast<std::uintptr_t>(from) % kAlignment != 0) fail_lane("a misaligned load", __FILE__, __LINE__);
  __builtin_memcpy(&pack, from, sizeof pack);
#else
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 words = reinterpret_cast<const uint4*>(from)[i];
      memcpy(reinterpret_cast<char*>(&pack) + 16 * i, &words, 16);
    }
  } else if constexpr (kBytes == 8 && count > 1) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    memcpy(&pack, &words, 8);
  } else if constexpr (kBytes == 4 && count > 1) {
    const unsigned word = *reinterpret_cast<const unsigned*>(from);
    memcpy(&pack, &word, 4);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) pack.values[i] = from[i];
  }
#endif
  return pack;
}

// Written as an instruction: the compiler cuts some stores of 16 bytes up into four.
#ifndef TANDEM_SIMT
__device__ __forceinline__ void store_words(void* to, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ __forceinline__ void store_words(void* to, uint2 words) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y) : "memory");
}
#endif

template <int count, class T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, count>& pack) {
  constexpr int kBytes = count * static_cast<int>(sizeof(T));
#ifdef TANDEM_SIMT
  constexpr int kAlignment = kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : kBytes % 4 == 0 ? 4 : static_cast<int>(sizeof(T));
  if (reinterpret_cast<std::uintptr_t>(to) % kAlignment != 0) fail_lane("a misaligned store", __FILE__, __LINE__);
  __builtin_memcpy(to, &pack, sizeof pack);
#else
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      uint4 words;
      memcpy(&words, reinterpret_cast<const char*>(&pack) + 16 * i, 16);
      store_words(reinterpret_cast<char*>(to) + 16 * i, words);
    }
  } else if constexpr (kBytes == 8 && count > 1) {
    uint2 words;
    memcpy(&words, &pack, 8);
    store_words(to, words);
  } else if constexpr (kBytes == 4 && count > 1) {
    unsigned word;
    memcpy(&word, &pack, 4);
    *reinterpret_cast<unsigned*>(to) = word;
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = pack.get(i);
  }
#endif
}

/// `values` rounded to T: from_wide() of each, two at a time where they are 16 bits wide. What the instruction makes of NaN is
/// put right behind a branch that is hardly ever taken.
template <class T, int count>
__device__ __forceinline__ Pack<T, count> pack_of(const Wide<T> (&values)[count]) {
  Pack<T, count> pack{};
#ifndef TANDEM_SIMT
  if constexpr (sizeof(T) == 2 && count % 2 == 0) {
    bool are_numbers = true;
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      pack.words[i / 2] = rounded_pair(values[i], values[i + 1], T{});
      are_numbers = are_numbers && values[i] == values[i] && values[i + 1] == values[i + 1];
    }
    if (are_numbers) return pack;
  }
#endif
#pragma unroll
  for (int i = 0; i < count; ++i) pack.set(i, from_wide<T>(values[i]));
  return pack;
}

/// Says nothing of the values, but the compiler cannot know: it keeps them as they are stored instead of holding on to what it
/// has widened, which takes twice the registers with 16 bits.
template <class T, int count>
__device__ __forceinline__ void keep_packed([[maybe_unused]] Pack<T, count>& pack) {
#ifndef TANDEM_SIMT
  if constexpr (sizeof(T) == 2 && count % 2 == 0) {
#pragma unroll
    for (int i = 0; i < count / 2; ++i) asm volatile("" : "+r"(pack.words[i]));
  }
#endif
}

/// What of a flat run of elements a thread of map-like kernels does: `kUnroll` packs, kMapThreads apart, so that every access of
/// a warp is of neighbours and all loads of a thread are under way before the first is used.
inline constexpr int kMapThreads = 256;

/// Blocks for `count` elements; one at least.
template <int kPack, int kUnroll>
[[nodiscard]] dim3 map_grid(std::int64_t count) {
  const std::int64_t per_block = std::int64_t{kMapThreads} * kPack * kUnroll;
  return dim3(static_cast<unsigned>(count <= per_block ? 1 : (count + per_block - 1) / per_block));
}
/// Index of the first of the thread's packs.
template <int kUnroll>
__device__ __forceinline__ std::int64_t map_first_pack() {
  return static_cast<std::int64_t>(blockIdx.x) * (kMapThreads * kUnroll) + threadIdx.x;
}
/// Calls use(element) for the elements behind the last whole pack, in the last block.
template <int kPack, class Use>
__device__ __forceinline__ void map_tail(std::int64_t count, const Use& use) {
  if constexpr (kPack > 1) {
    const std::int64_t element = count / kPack * kPack + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && element < count) use(element);
  }
}

}  // namespace tandem::TANDEM_GPU

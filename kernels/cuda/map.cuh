// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/vector_access.cuh"

/// Kernels that do the same with every element.
namespace tandem::TANDEM_GPU {

/// to[i] = f(from[i]); f takes the wide type and gives that of To, to which it is rounded. No two threads share an element, and
/// each reads before it writes: `to` may be `from`.
template <int kPack, int kUnroll, class From, class To, class F>
__global__ void __launch_bounds__(kMapThreads) map_kernel(const From* from, To* to, std::int64_t count, F f) {
  const std::int64_t packs = count / kPack, first = map_first_pack<kUnroll>();
  Pack<From, kPack> in[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t pack = first + u * kMapThreads;
    if (pack < packs) in[u] = load_pack<kPack>(from + pack * kPack);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t pack = first + u * kMapThreads;
    if (pack >= packs) continue;
    Wide<To> out[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) out[i] = f(to_wide(in[u].get(i)));
    store_pack(to + pack * kPack, pack_of<To>(out));
  }
  map_tail<kPack>(count, [&](std::int64_t i) { to[i] = from_wide<To>(f(to_wide(from[i]))); });
}

/// out[i] = f(a[i], b[i]); `out` may be one of them.
template <int kPack, int kUnroll, class A, class B, class Out, class F>
__global__ void __launch_bounds__(kMapThreads) map_two_kernel(const A* a, const B* b, Out* out, std::int64_t count, F f) {
  const std::int64_t packs = count / kPack, first = map_first_pack<kUnroll>();
  Pack<A, kPack> in_a[kUnroll];
  Pack<B, kPack> in_b[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t pack = first + u * kMapThreads;
    if (pack >= packs) continue;
    in_a[u] = load_pack<kPack>(a + pack * kPack);
    in_b[u] = load_pack<kPack>(b + pack * kPack);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t pack = first + u * kMapThreads;
    if (pack >= packs) continue;
    Wide<Out> result[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) result[i] = f(to_wide(in_a[u].get(i)), to_wide(in_b[u].get(i)));
    store_pack(out + pack * kPack, pack_of<Out>(result));
  }
  map_tail<kPack>(count, [&](std::int64_t i) { out[i] = from_wide<Out>(f(to_wide(a[i]), to_wide(b[i]))); });
}

/// 16 bytes of the widest type at a time; single elements where something is not aligned.
template <class From, class To, class F>
void launch_map(const From* from, To* to, std::int64_t count, const F& f, StreamHandle stream) {
  constexpr int kPack = kPerVector<From> < kPerVector<To> ? kPerVector<From> : kPerVector<To>;
  if (count == 0) return;
  if (are_aligned(from, to)) {
    launch(map_kernel<kPack, 4, From, To, F>, map_grid<kPack, 4>(count), dim3(kMapThreads), 0, stream, from, to, count, f);
  } else {
    launch(map_kernel<1, 4, From, To, F>, map_grid<1, 4>(count), dim3(kMapThreads), 0, stream, from, to, count, f);
  }
}
template <class A, class B, class Out, class F>
void launch_map_two(const A* a, const B* b, Out* out, std::int64_t count, const F& f, StreamHandle stream) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));
  static_assert(sizeof(Out) <= sizeof(A) || sizeof(Out) <= sizeof(B));
  if (count == 0) return;
  if (are_aligned(a, b, out)) {
    launch(map_two_kernel<kPack, 2, A, B, Out, F>, map_grid<kPack, 2>(count), dim3(kMapThreads), 0, stream, a, b, out, count, f);
  } else {
    launch(map_two_kernel<1, 4, A, B, Out, F>, map_grid<1, 4>(count), dim3(kMapThreads), 0, stream, a, b, out, count, f);
  }
}

}  // namespace tandem::TANDEM_GPU

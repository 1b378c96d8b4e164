// SPDX-License-Identifier: Apache-2.0
// Sums of many arrays, element by element in the order of the arrays. A thread takes one piece of all of them; four loads are
// under way before the first is added.
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/sum_kernels.h"
#include "kernels/cuda/vector_access.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kThreads = 256;
constexpr int kPieceBytes = 16;
constexpr int kAhead = 4;

/// In what elements are added. Integers are unsigned, so that they wrap around.
template <class T>
struct Summand {
  using Sum = T;
  __device__ static T widen(T value) { return value; }
  __device__ static T narrow(T value) { return value; }
};
template <>
struct Summand<bf16> {
  using Sum = float;
  __device__ static float widen(bf16 value) { return to_wide(value); }
  __device__ static bf16 narrow(float value) { return from_wide<bf16>(value); }
};
template <>
struct Summand<f16> {
  using Sum = float;
  __device__ static float widen(f16 value) { return to_wide(value); }
  __device__ static f16 narrow(float value) { return from_wide<f16>(value); }
};

struct Short {
  std::uint16_t bits;
};
template <>
struct Summand<Short> {
  using Sum = std::uint32_t;
  __device__ static std::uint32_t widen(Short value) { return value.bits; }
  __device__ static Short narrow(std::uint32_t value) { return {static_cast<std::uint16_t>(value)}; }
};

/// destinations[first .. first + kElements) of all, aligned to the accesses of load_pack<kElements>().
template <class T, int kElements>
__device__ void sum_piece(const SumTable& table, std::int64_t first) {
  using Sum = typename Summand<T>::Sum;
  const auto source = [&](int s) { return reinterpret_cast<const T*>(table.sources[s]) + first; };
  Sum sum[kElements];
  Pack<T, kElements> pieces[kAhead];
  pieces[0] = load_pack<kElements>(source(0));
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum[i] = Summand<T>::widen(pieces[0].get(i));
  int s = 1;
  for (; s + kAhead <= table.num_sources; s += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) pieces[a] = load_pack<kElements>(source(s + a));
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum[i] = static_cast<Sum>(sum[i] + Summand<T>::widen(pieces[a].get(i)));
    }
  }
  for (; s < table.num_sources; ++s) {
    pieces[0] = load_pack<kElements>(source(s));
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = static_cast<Sum>(sum[i] + Summand<T>::widen(pieces[0].get(i)));
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) pieces[0].set(i, Summand<T>::narrow(sum[i]));
  for (int d = 0; d < table.num_destinations; ++d) {
    store_pack(reinterpret_cast<T*>(table.destinations[d]) + first, pieces[0]);
  }
}

/// Elements [0, head) and [tail, count) one a thread, by the first block; what is between in pieces.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_pieces_kernel(const SumTable table, std::int64_t head, std::int64_t pieces, std::int64_t count) {
  constexpr int kPiece = kPerVector<T>;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t tail = head + pieces * kPiece;
  if (thread < pieces) sum_piece<T, kPiece>(table, head + thread * kPiece);
  if (thread < head) sum_piece<T, 1>(table, thread);
  if (tail + thread < count && thread < kPiece) sum_piece<T, 1>(table, tail + thread);
}

template <class T>
__global__ void __launch_bounds__(kThreads) sum_elements_kernel(const SumTable table, std::int64_t count) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread < count) sum_piece<T, 1>(table, thread);
}

bool lie_alike(const SumTable& table) {
  const auto place = [](const void* address) { return reinterpret_cast<std::uintptr_t>(address) % kPieceBytes; };
  bool alike = true;
  for (int s = 0; s < table.num_sources; ++s) alike = alike && place(table.sources[s]) == place(table.sources[0]);
  for (int d = 0; d < table.num_destinations; ++d) alike = alike && place(table.destinations[d]) == place(table.sources[0]);
  return alike;
}

dim3 grid_for(std::int64_t threads) { return dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)); }

template <class T>
void sum_as(const SumTable& table, std::int64_t count, StreamHandle stream) {
  if (!lie_alike(table)) {
    launch(sum_elements_kernel<T>, grid_for(count), dim3(kThreads), 0, stream, table, count);
    return;
  }
  constexpr int kPiece = kPerVector<T>;
  const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(table.sources[0]) % kPieceBytes);
  const std::int64_t wanted = (kPieceBytes - misaligned) % kPieceBytes / static_cast<std::int64_t>(sizeof(T));
  const std::int64_t head = wanted < count ? wanted : count, pieces = (count - head) / kPiece;
  launch(sum_pieces_kernel<T>, grid_for(pieces > 0 ? pieces : 1), dim3(kThreads), 0, stream, table, head, pieces, count);
}

}  // namespace

void launch_sum_in_order(DType dtype, const SumTable& table, std::int64_t count, StreamHandle stream) {
  switch (dtype) {
    case DType::f64: return sum_as<double>(table, count, stream);
    case DType::f32: return sum_as<float>(table, count, stream);
    case DType::f16: return sum_as<f16>(table, count, stream);
    case DType::bf16: return sum_as<bf16>(table, count, stream);
    case DType::i64: return sum_as<std::uint64_t>(table, count, stream);
    case DType::i32: return sum_as<std::uint32_t>(table, count, stream);
    case DType::i16:
    case DType::u16: return sum_as<Short>(table, count, stream);
    case DType::i8:
    case DType::u8: return sum_as<std::uint8_t>(table, count, stream);
  }
}

}  // namespace tandem::TANDEM_GPU

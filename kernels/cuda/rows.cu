// SPDX-License-Identifier: Apache-2.0
// Rows of tables picked by index. Threads of a block lie beside each other along a row, in powers of two; what of the block is
// left takes further rows.
#include "kernels/cuda/rows_kernels.h"

#include "kernels/cuda/vector_access.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kThreads = 256;

struct RowsShape {
  std::int64_t tokens, width;
};
struct RowsGrid {
  dim3 grid, block;
};
RowsGrid rows_grid(std::int64_t rows, std::int64_t packs) {
  unsigned along = 32;
  while (along < kThreads && along < packs) along *= 2;
  const unsigned beside = kThreads / along;
  return {dim3(static_cast<unsigned>((rows + beside - 1) / beside)), dim3(along, beside)};
}
__device__ __forceinline__ std::int64_t row_of_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

template <class T, int count>
__device__ __forceinline__ Pack<T, count> sum_of(const Pack<T, count>& a, const Pack<T, count>& b) {
  Wide<T> sums[count];
#pragma unroll
  for (int i = 0; i < count; ++i) sums[i] = to_wide(a.get(i)) + to_wide(b.get(i));
  return pack_of<T>(sums);
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) embedding_kernel(RowsShape shape, const std::int32_t* ids,
                                                             const std::int32_t* positions, const T* wte, const T* wpe, T* out) {
  const std::int64_t t = row_of_thread();
  if (t >= shape.tokens) return;
  const T *const token = wte + ids[t] * shape.width, *const position = wpe + positions[t] * shape.width;
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * kPack; c < shape.width; c += blockDim.x * kPack) {
    store_pack(out + t * shape.width + c, sum_of(load_pack<kPack>(token + c), load_pack<kPack>(position + c)));
  }
}

/// Word: what a row is moved in. `width` in words.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(RowsShape shape, const std::int32_t* ids, const Word* table, Word* out) {
  const std::int64_t t = row_of_thread();
  if (t >= shape.tokens) return;
  const std::int64_t id = ids[t];
  for (std::int64_t c = threadIdx.x; c < shape.width; c += blockDim.x) {
    out[t * shape.width + c] = id < 0 ? Word{} : table[id * shape.width + c];
  }
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    add_gathered_kernel(RowsShape shape, const std::int32_t* ids, const T* table, T* out) {
  const std::int64_t t = row_of_thread();
  if (t >= shape.tokens || ids[t] < 0) return;
  const T* const row = table + ids[t] * shape.width;
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * kPack; c < shape.width; c += blockDim.x * kPack) {
    T* const to = out + t * shape.width + c;
    store_pack(to, sum_of(load_pack<kPack>(to), load_pack<kPack>(row + c)));
  }
}

/// A warp takes one tile of columns of one run: a long run (a frequent token) is summed by as many warps as the row has tiles.
/// The loads of eight tokens are under way at once, their sums wait for each other.
template <class T, class Sum, int kPack>
__global__ void __launch_bounds__(kThreads) scatter_add_kernel(RowsShape shape, RowRuns runs, const T* x, Sum* table) {
  constexpr int kUnroll = 8;
  const std::int64_t tiles = (shape.width + 32 * kPack - 1) / (32 * kPack);
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const std::int64_t run = item / tiles, column = ((item - run * tiles) * 32 + threadIdx.x % 32) * kPack;
  if (run >= shape.tokens || column >= shape.width) return;
  const std::int32_t begin = runs.begins[run], end = runs.begins[run + 1];
  if (begin == end) return;
  Sum* const to = table + runs.rows[run] * shape.width + column;
  const Pack<Sum, kPack> kept = load_pack<kPack>(to);
  Wide<T> sums[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) sums[i] = to_wide(kept.get(i));
  for (std::int32_t first = begin; first < end; first += kUnroll) {
    Pack<T, kPack> added[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u < end) added[u] = load_pack<kPack>(x + runs.order[first + u] * shape.width + column);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u >= end) continue;
#pragma unroll
      for (int i = 0; i < kPack; ++i) sums[i] += to_wide(added[u].get(i));
    }
  }
  store_pack(to, pack_of<Sum>(sums));
}

template <class T>
struct Combine {
  const std::int32_t* slots;
  const Wide<T>* gates;
  std::int64_t choices;
};

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) combine_kernel(RowsShape shape, Combine<T> combine, const T* y, T* out) {
  const std::int64_t t = row_of_thread();
  if (t >= shape.tokens) return;
  const std::int32_t* const slots = combine.slots + t * combine.choices;
  const Wide<T>* const gates = combine.gates + t * combine.choices;
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * kPack; c < shape.width; c += blockDim.x * kPack) {
    Wide<T> sums[kPack] = {};
#pragma unroll 2
    for (std::int64_t k = 0; k < combine.choices; ++k) {
      if (slots[k] < 0) continue;
      const Pack<T, kPack> row = load_pack<kPack>(y + slots[k] * shape.width + c);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sums[i] += gates[k] * to_wide(row.get(i));
    }
    store_pack(out + t * shape.width + c, pack_of<T>(sums));
  }
}

/// A warp takes one choice of one token; the warps of a token's choices are neighbours, so that dout comes from memory once.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    combine_backward_kernel(RowsShape shape, Combine<T> combine, const T* dout, const T* y, Wide<T>* dgates, T* dy) {
  const std::int64_t choice = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (choice >= shape.tokens * combine.choices) return;
  const std::int64_t t = choice / combine.choices, slot = combine.slots[choice];
  Wide<T> dot = 0;
  if (slot >= 0) {
    const Wide<T> gate = combine.gates[choice];
#pragma unroll 2
    for (std::int64_t c = lane * kPack; c < shape.width; c += 32 * kPack) {
      const Pack<T, kPack> gradient = load_pack<kPack>(dout + t * shape.width + c);
      const Pack<T, kPack> row = load_pack<kPack>(y + slot * shape.width + c);
      Wide<T> scaled[kPack];
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const Wide<T> g = to_wide(gradient.get(i));
        dot += g * to_wide(row.get(i));
        scaled[i] = gate * g;
      }
      store_pack(dy + slot * shape.width + c, pack_of<T>(scaled));
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) dot += __shfl_xor_sync(0xFFFFFFFFU, dot, distance);
  if (lane == 0) dgates[choice] = dot;
}

/// Calls use(T{}, pack) with the storage type and, as std::integral_constant, the elements of an access.
template <class Use, class... Pointers>
void with_rows(const TokenRows& size, const Use& use, const Pointers*... pointers) {
  with_storage(size.dtype, [&]<class T>(T) {
    if (size.width % kPerVector<T> == 0 && are_aligned(pointers...)) {
      use(T{}, std::integral_constant<int, kPerVector<T>>{});
    } else {
      use(T{}, std::integral_constant<int, 1>{});
    }
  });
}
bool is_empty(const TokenRows& size) { return size.tokens == 0 || size.width == 0; }

template <class Word>
void launch_gather_of(std::int64_t tokens, std::int64_t row_bytes, const std::int32_t* ids, const void* table, void* out,
                      StreamHandle stream) {
  const RowsShape shape{tokens, row_bytes / static_cast<std::int64_t>(sizeof(Word))};
  const RowsGrid grid = rows_grid(tokens, shape.width);
  launch(gather_kernel<Word>, grid.grid, grid.block, 0, stream, shape, ids, static_cast<const Word*>(table),
         static_cast<Word*>(out));
}

}  // namespace

void launch_embedding(const TokenRows& size, const std::int32_t* ids, const std::int32_t* positions, const void* wte,
                      const void* wpe, void* out, StreamHandle stream) {
  if (is_empty(size)) return;
  const auto launch_of = [&]<class T, int kPack>(T, std::integral_constant<int, kPack>) {
    const RowsGrid grid = rows_grid(size.tokens, size.width / kPack);
    launch(embedding_kernel<T, kPack>, grid.grid, grid.block, 0, stream, RowsShape{size.tokens, size.width}, ids, positions,
           static_cast<const T*>(wte), static_cast<const T*>(wpe), static_cast<T*>(out));
  };
  with_rows(size, launch_of, wte, wpe, out);
}

void launch_gather(const TokenRows& size, const std::int32_t* ids, const void* table, void* out, StreamHandle stream) {
  if (is_empty(size)) return;
  const auto element = static_cast<std::int64_t>(size_bytes(size.dtype)), row_bytes = size.width * element;
  const auto fits = [&](std::uintptr_t word) {
    return static_cast<std::uintptr_t>(row_bytes) % word == 0 && reinterpret_cast<std::uintptr_t>(table) % word == 0 &&
           reinterpret_cast<std::uintptr_t>(out) % word == 0;
  };
  if (fits(16)) return launch_gather_of<uint4>(size.tokens, row_bytes, ids, table, out, stream);
  if (fits(4)) return launch_gather_of<std::uint32_t>(size.tokens, row_bytes, ids, table, out, stream);
  if (fits(2)) return launch_gather_of<std::uint16_t>(size.tokens, row_bytes, ids, table, out, stream);
  launch_gather_of<std::uint8_t>(size.tokens, row_bytes, ids, table, out, stream);
}

void launch_add_gathered(const TokenRows& size, const std::int32_t* ids, const void* table, void* out, StreamHandle stream) {
  if (is_empty(size)) return;
  const auto launch_of = [&]<class T, int kPack>(T, std::integral_constant<int, kPack>) {
    const RowsGrid grid = rows_grid(size.tokens, size.width / kPack);
    launch(add_gathered_kernel<T, kPack>, grid.grid, grid.block, 0, stream, RowsShape{size.tokens, size.width}, ids,
           static_cast<const T*>(table), static_cast<T*>(out));
  };
  with_rows(size, launch_of, table, out);
}

void launch_scatter_add(const TokenRows& size, const RowRuns& runs, const void* x, DType sums, void* table, StreamHandle stream) {
  if (is_empty(size)) return;
  const auto launch_of = [&]<class T, int kPack>(T, std::integral_constant<int, kPack>) {
    const std::int64_t tiles = (size.width + 32 * kPack - 1) / (32 * kPack), warps = kThreads / 32;
    const dim3 grid(static_cast<unsigned>((size.tokens * tiles + warps - 1) / warps));
    const RowsShape shape{size.tokens, size.width};
    if constexpr (sizeof(T) == 2) {
      if (sums == DType::f32) {
        launch(scatter_add_kernel<T, float, kPack>, grid, dim3(kThreads), 0, stream, shape, runs, static_cast<const T*>(x),
               static_cast<float*>(table));
        return;
      }
    }
    launch(scatter_add_kernel<T, T, kPack>, grid, dim3(kThreads), 0, stream, shape, runs, static_cast<const T*>(x),
           static_cast<T*>(table));
  };
  with_rows(size, launch_of, x, table);
}

void launch_combine(const CombineSize& size, const std::int32_t* slots, const void* gates, const void* y, void* out,
                    StreamHandle stream) {
  if (is_empty(size.rows)) return;
  const auto launch_of = [&]<class T, int kPack>(T, std::integral_constant<int, kPack>) {
    const RowsGrid grid = rows_grid(size.rows.tokens, size.rows.width / kPack);
    const Combine<T> combine{slots, static_cast<const Wide<T>*>(gates), size.choices};
    launch(combine_kernel<T, kPack>, grid.grid, grid.block, 0, stream, RowsShape{size.rows.tokens, size.rows.width}, combine,
           static_cast<const T*>(y), static_cast<T*>(out));
  };
  with_rows(size.rows, launch_of, y, out);
}

void launch_combine_backward(const CombineSize& size, const std::int32_t* slots, const void* gates, const void* dout,
                             const void* y, void* dgates, void* dy, StreamHandle stream) {
  if (is_empty(size.rows)) return;
  const auto launch_of = [&]<class T, int kPack>(T, std::integral_constant<int, kPack>) {
    const std::int64_t warps = kThreads / 32, items = size.rows.tokens * size.choices;
    const Combine<T> combine{slots, static_cast<const Wide<T>*>(gates), size.choices};
    launch(combine_backward_kernel<T, kPack>, dim3(static_cast<unsigned>((items + warps - 1) / warps)), dim3(kThreads), 0, stream,
           RowsShape{size.rows.tokens, size.rows.width}, combine, static_cast<const T*>(dout), static_cast<const T*>(y),
           static_cast<Wide<T>*>(dgates), static_cast<T*>(dy));
  };
  with_rows(size.rows, launch_of, dout, y, dy);
}

}  // namespace tandem::TANDEM_GPU

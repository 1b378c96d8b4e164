// SPDX-License-Identifier: Apache-2.0
// What comes before the gradients on tensor cores: of each query the sum of dout * out, in one line with its other numbers.
#include "kernels/cuda/attention_tensor_core_backward.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kThreads = 256;

/// 8 neighbouring numbers, 16-byte aligned or (of fp32) 32-byte aligned.
template <class T>
__device__ inline void read_eight(const T* from, float (&to)[8]) {
  struct alignas(16) Numbers {
    T value[16 / sizeof(T)];
  };
  constexpr int kEach = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int first = 0; first < 8; first += kEach) {
    const Numbers numbers = *reinterpret_cast<const Numbers*>(from + first);
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[first + i] = to_wide(numbers.value[i]);
  }
}

/// kLanes neighbouring lanes for each query of [rows, heads, queries in whole tiles], eight channels each.
template <class T, class Out, int kLanes>
__global__ void __launch_bounds__(kThreads) lines_kernel(const AttentionWork work, int padded) {
  const std::int64_t index = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const std::int64_t of_head = index / padded;
  const int query = static_cast<int>(index % padded), head = static_cast<int>(of_head % work.heads);
  const int row = static_cast<int>(of_head / work.heads), channel = static_cast<int>(threadIdx.x) % kLanes * 8;
  const bool there = row < work.rows && query < work.queries;
  float sum = 0;
  if (there && channel < work.head_size) {
    float dout[8], out[8];
    read_eight(operand_at<const T>(work, work.dout, row, head, query) + channel, dout);
    read_eight(operand_at<const Out>(work, work.out, row, head, query) + channel, out);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += dout[i] * out[i];
  }
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) sum += __shfl_xor_sync(kFullMask, sum, other);
  if (channel != 0 || row >= work.rows) return;
  QueryLine line = {0, 0, 0, 0};
  if (there) {
    const SeenKeys seen = seen_keys(work, row, query);
    line = {static_cast<const float*>(work.logsumexp)[statistic_index(work, row, head, query)] * kLog2E, sum, seen.begin,
            seen.end};
  }
  static_cast<QueryLine*>(work.query_lines)[index] = line;
}

int padded_queries(const AttentionWork& work) { return (work.queries + kStartTile - 1) / kStartTile * kStartTile; }

template <class T, class Out, int kLanes>
void launch_lines(const AttentionWork& work, StreamHandle stream) {
  const std::int64_t threads = static_cast<std::int64_t>(work.rows) * work.heads * padded_queries(work) * kLanes;
  launch(lines_kernel<T, Out, kLanes>, dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)), dim3(kThreads), 0,
         stream, work, padded_queries(work));
}

}  // namespace

std::int64_t query_line_bytes(const AttentionWork& work) {
  return static_cast<std::int64_t>(work.rows) * work.heads * padded_queries(work) * static_cast<std::int64_t>(sizeof(QueryLine));
}

void launch_attention_query_lines(const AttentionWork& work, StreamHandle stream) {
  const bool wide_out = work.accumulate && work.sums == DType::f32;
  const auto run = [&]<class T>(T) {
    const bool few = work.head_size <= 64;
    if (wide_out) return few ? launch_lines<T, float, 8>(work, stream) : launch_lines<T, float, 16>(work, stream);
    return few ? launch_lines<T, T, 8>(work, stream) : launch_lines<T, T, 16>(work, stream);
  };
  work.dtype == DType::bf16 ? run(bf16{}) : run(f16{});
}

}  // namespace tandem::TANDEM_GPU

// SPDX-License-Identifier: Apache-2.0
#pragma once

// What kernels and launchers need beyond plain CUDA C++, with one implementation for a GPU and one for the emulated GPU:
//
//   launch(kernel, grid, block, shared_bytes, stream, arguments...)   by value; throws GpuError where CUDA refuses the launch.
//   Raises the
//                                 kernel's limit of dynamic shared memory itself where it is beyond 48 KiB
//   GPU_DYNAMIC_SHARED(type, name);   type* name: the block's dynamic shared memory, 16-byte aligned (128 at least on the
//   emulator) kWarpSize, kFullMask
//
//   copy_async_16(to_shared, from_global)     16 bytes, both ends 16-byte aligned; what is read before copy_async_wait() is
//   undefined copy_async_16_or_zero(to_shared, from_global, exists)   zeros where `exists` does not hold; nothing is read there
//   copy_async_commit()           ends a group of copies of this thread
//   copy_async_wait<N>()          of this thread's groups all but the last N are done; others need a barrier behind it
//
//   load_matrix_x4(r, row)        ldmatrix.x4.b16: four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8
//   of
//                                 matrix l / 8 (16-byte aligned, shared memory); r[i] gets of matrix i, row l / 4, columns 2 (l %
//                                 4) and + 1
//   load_matrix_x4_transposed     ... rows 2 (l % 4) and + 1 of column l / 4
//   mma_16x8x16(d, a, b, tag)     d += a b with fp32 sums, all lanes of a warp together; tag: bf16{} or f16{}. With g = l / 4, t
//   = l % 4,
//                                 two elements a register, the lower half first:
//     a [16, 16]: a[0] (g, 2t..)  a[1] (g + 8, 2t..)  a[2] (g, 2t + 8..)  a[3] (g + 8, 2t + 8..)
//     b [16, 8]:  b[0] (2t.., g)  b[1] (2t + 8.., g)
//     d [16, 8]:  d[0], d[1] (g, 2t..)  d[2], d[3] (g + 8, 2t..)
//   So load_matrix_x4 of a row-major A tile with the matrices (0,0) (8,0) (0,8) (8,8) gives a, and of B^T stored row-major [n, k]
//   with the matrices (n 0, k 0) (n 0, k 8) gives b; for B stored [k, n] it is load_matrix_x4_transposed.

#include <cstdint>

#include "kernels/cuda/gpu.h"

namespace tandem::TANDEM_GPU {

/// 16-bit storage types: bits, never computed with (numbers.cuh).
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

}  // namespace tandem::TANDEM_GPU

#ifdef TANDEM_SIMT
#include "kernels/simt/launch.h"
#else
#include "kernels/cuda/launch_cuda.cuh"
#endif

namespace tandem::TANDEM_GPU {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xFFFFFFFFU;

}  // namespace tandem::TANDEM_GPU

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/gpu.h"

// launch.cuh for a GPU. The PTX is that of "Parallel Thread Execution ISA", sections cp.async, ldmatrix and mma (sm_80 and
// later).

#define GPU_DYNAMIC_SHARED(type, name)                                                                                           \
  extern __shared__ __align__(128) unsigned char gpu_dynamic_shared[];                                                           \
  type* const name = reinterpret_cast<type*>(gpu_dynamic_shared)

namespace tandem::cuda_gpu {

inline void check_launch(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw GpuError(std::string("CUDA: ") + call + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes, StreamHandle stream,
            Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  constexpr int kWithoutAsking = 48 * 1024;
  if (shared_bytes > kWithoutAsking) {
    check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                 "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
  }
  kernel<<<grid, block, static_cast<std::size_t>(shared_bytes), stream>>>(
      static_cast<Parameters>(std::forward<Arguments>(arguments))...);
  check_launch(cudaGetLastError(), "kernel launch");
}

__device__ inline std::uint32_t shared_address(const void* address) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(address));
}

__device__ inline void copy_async_16(void* to_shared, const void* from_global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from_global) : "memory");
}
__device__ inline void copy_async_16_or_zero(void* to_shared, const void* from_global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from_global),
               "r"(exists ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

__device__ inline void load_matrix_x4(std::uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
__device__ inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

__device__ inline void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], f16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace tandem::cuda_gpu

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>

#include "kernels/cuda/gpu.h"
#include "kernels/simt/block.h"
#include "kernels/simt/words.h"

// kernels/cuda/launch.cuh for the emulated GPU.
namespace tandem::simt_gpu {

/// Checks the sizes and puts the grid into the queue; body(closure) is one thread.
void enqueue_grid(StreamHandle stream, dim3 grid, dim3 block, int shared_bytes, void (*body)(const void*),
                  std::shared_ptr<const void> closure);

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes, StreamHandle stream,
            Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  };
  auto call = std::make_shared<const Call>(
      Call{kernel, std::tuple<Parameters...>(static_cast<Parameters>(std::forward<Arguments>(arguments))...)});
  const auto body = [](const void* closure) {
    const auto& of = *static_cast<const Call*>(closure);
    std::apply(of.kernel, of.arguments);
  };
  enqueue_grid(stream, grid, block, shared_bytes, body, std::move(call));
}

// The copy itself happens in copy_async_wait(); until then there is poison at its end, which CUDA allows as well.
void copy_async_16(void* to_shared, const void* from_global, const char* file = __builtin_FILE(), int line = __builtin_LINE());
void copy_async_16_or_zero(void* to_shared, const void* from_global, bool exists, const char* file = __builtin_FILE(),
                           int line = __builtin_LINE());
void copy_async_commit();
void finish_copies(std::size_t groups_left);
template <int groups>
void copy_async_wait() {
  finish_copies(groups);
}

inline void check_aligned(const void* address, const char* what, const char* file, int line) {
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0) fail_lane(what, file, line);
}
/// ldmatrix of rows that each lane has read for itself (here, where a sanitizer sees the kernel read them).
void exchange_matrices(std::uint32_t (&r)[4], const std::uint32_t (&row)[4], bool transposed, const char* file, int line);
inline void load_matrix_x4(std::uint32_t (&r)[4], const void* shared_row, const char* file = __builtin_FILE(),
                           int line = __builtin_LINE()) {
  check_aligned(shared_row, "ldmatrix of a row that is not 16-byte aligned", file, line);
  std::uint32_t row[4];
  __builtin_memcpy(row, shared_row, sizeof row);
  exchange_matrices(r, row, false, file, line);
}
inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* shared_row, const char* file = __builtin_FILE(),
                                      int line = __builtin_LINE()) {
  check_aligned(shared_row, "ldmatrix of a row that is not 16-byte aligned", file, line);
  std::uint32_t row[4];
  __builtin_memcpy(row, shared_row, sizeof row);
  exchange_matrices(r, row, true, file, line);
}
void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], bf16 tag,
                 const char* file = __builtin_FILE(), int line = __builtin_LINE());
void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], f16 tag,
                 const char* file = __builtin_FILE(), int line = __builtin_LINE());

}  // namespace tandem::simt_gpu

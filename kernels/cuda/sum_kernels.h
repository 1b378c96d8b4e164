// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/gpu.h"

namespace tandem::TANDEM_GPU {

inline constexpr int kMostSummands = 64;

/// Addresses of device memory, passed to the kernel by value.
struct SumTable {
  const std::byte* sources[kMostSummands];
  std::byte* destinations[kMostSummands];
  int num_sources = 0, num_destinations = 0;
};
/// Memory::sum_in_order. Pieces of 16 bytes where all addresses are the same modulo 16, else an element at a time.
void launch_sum_in_order(DType dtype, const SumTable& table, std::int64_t count, StreamHandle stream);

}  // namespace tandem::TANDEM_GPU

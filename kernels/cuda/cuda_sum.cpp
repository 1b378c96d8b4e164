// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/sum_kernels.h"

namespace tandem::TANDEM_GPU {

void DeviceMemory::sum_in_order(DType dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                                std::int64_t count) {
  TANDEM_CHECK(!sources.empty() && sources.size() <= kMostSummands && destinations.size() <= kMostSummands,
               fmt::format("a sum of {} to {} places; at most {} of each", sources.size(), destinations.size(), kMostSummands));
  const auto misaligned = [&](const std::byte* address) {
    return reinterpret_cast<std::uintptr_t>(address) % size_bytes(dtype) != 0;
  };
  TANDEM_CHECK(std::ranges::none_of(sources, misaligned) && std::ranges::none_of(destinations, misaligned),
               fmt::format("a sum of {} at an address that is no multiple of its size", name(dtype)));
  if (count == 0 || destinations.empty()) return;
  SumTable table;
  table.num_sources = static_cast<int>(sources.size());
  table.num_destinations = static_cast<int>(destinations.size());
  std::ranges::copy(sources, table.sources);
  std::ranges::copy(destinations, table.destinations);
  launch_sum_in_order(dtype, table, count, stream());
}

}  // namespace tandem::TANDEM_GPU

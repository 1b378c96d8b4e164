// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/simt/queue.h"

namespace tandem::simt_gpu {
namespace {

void check_sizes(dim3 grid, dim3 block, int shared_bytes) {
  constexpr std::uint64_t kMostBlocks = 0x7FFFFFFF;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  const bool grid_fits = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= kMostBlocks && grid.y <= 65535 && grid.z <= 65535;
  if (grid_fits && threads > 0 && threads <= 1024 && block.z <= 64 && shared_bytes >= 0 && shared_bytes <= 227 * 1024) return;
  throw GpuError(
      fmt::format("emulated GPU: launch: invalid configuration: grid ({}, {}, {}), block ({}, {}, {}), {} bytes of shared memory",
                  grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes));
}

}  // namespace

void enqueue_grid(StreamHandle stream, dim3 grid, dim3 block, int shared_bytes, void (*body)(const void*),
                  std::shared_ptr<const void> closure) {
  check_sizes(grid, block, shared_bytes);
  if (stream == nullptr) throw GpuError("emulated GPU: launch: no stream (the default one is not used here)");
  const GridSpec spec = {grid, block, static_cast<std::size_t>(shared_bytes), stream->next_seed()};
  stream->add([spec, body, closure = std::move(closure)] { run_grid(spec, body, closure.get()); });
}

void copy_async_16(void* to_shared, const void* from_global, const char* file, int line) {
  check_aligned(to_shared, "copy_async_16 to what is not 16-byte aligned", file, line);
  check_aligned(from_global, "copy_async_16 from what is not 16-byte aligned", file, line);
  std::memset(to_shared, 0xFF, 16);
  current_lane->copies.push_back({to_shared, from_global});
}

void copy_async_16_or_zero(void* to_shared, const void* from_global, bool exists, const char* file, int line) {
  if (exists) return copy_async_16(to_shared, from_global, file, line);
  check_aligned(to_shared, "copy_async_16 to what is not 16-byte aligned", file, line);
  std::memset(to_shared, 0xFF, 16);
  current_lane->copies.push_back({to_shared, nullptr});
}

void copy_async_commit() { current_lane->commits.push_back(current_lane->copies.size()); }

void finish_copies(std::size_t groups_left) {
  BlockThread& lane = *current_lane;
  if (lane.commits.size() <= groups_left) return;
  const std::size_t groups = lane.commits.size() - groups_left, copies = lane.commits[groups - 1];
  for (std::size_t i = 0; i < copies; ++i) {
    const BlockThread::Copy& copy = lane.copies[i];
    copy.from == nullptr ? std::memset(copy.to, 0, 16) : std::memcpy(copy.to, copy.from, 16);
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<std::ptrdiff_t>(copies));
  lane.commits.erase(lane.commits.begin(), lane.commits.begin() + static_cast<std::ptrdiff_t>(groups));
  for (std::size_t& end : lane.commits) end -= copies;
}

}  // namespace tandem::simt_gpu

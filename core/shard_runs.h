// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/shard.h"

namespace tandem {

/// Elements that lie one after the other both in a shard and in its global tensor.
struct ShardRun {
  std::int64_t global = 0;  ///< first element, flat, of the global tensor
  std::int64_t local = 0;   ///< first element of what the shard keeps (flat_range applied)
  std::int64_t count = 0;
  friend bool operator==(const ShardRun&, const ShardRun&) = default;
};

/// All elements that the shard keeps, padding left out, as the fewest runs, in ascending order of `global`. A whole tensor is one
/// run, columns of a matrix are one for each row and interval. Throws ContractError for slices that leave the global shape or
/// overlap, and for a flat_range that leaves the local tensor.
[[nodiscard]] std::vector<ShardRun> shard_runs(const ShardSpec& shard);

/// Elements of all runs.
[[nodiscard]] std::int64_t num_elements(std::span<const ShardRun> runs) noexcept;

/// Calls `visit(source_local, target_local, count)` for each stretch of elements that both shards keep of one global tensor.
/// Time is linear in the runs of both.
void for_each_common(std::span<const ShardRun> source_runs, std::span<const ShardRun> target_runs,
                     const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& visit);

/// Copies the elements that both shards keep of one global tensor from `source` to `target`, and returns how many these are.
/// Spans have the shards' num_elements() elements of `element_bytes` each (ContractError where a run leaves one). Time is linear
/// in the runs of both.
std::int64_t copy_common(std::span<const ShardRun> source_runs, std::span<const std::byte> source,
                         std::span<const ShardRun> target_runs, std::span<std::byte> target, std::size_t element_bytes);

}  // namespace tandem

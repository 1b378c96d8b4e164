// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/tensor.h"

namespace tandem {

/// A rectangular part of a tensor: one interval per dimension.
using Box = std::vector<Interval>;

/// What one rank holds of one global tensor. The local tensor is the concatenation of the boxes: the fused query-key-value weight
/// of a tensor-parallel rank is three boxes of columns, a zig-zag context slice is two. A ZeRO shard is a flat range of it.
struct ShardSpec {
  std::string global_name;
  Shape global_shape;
  DType dtype = DType::f32;
  std::vector<Box> boxes;
  std::optional<Interval> flat_range;  ///< elements of the local tensor that this rank really keeps; all when empty
  int replica_index = 0;               ///< replica 0 counts in norms and is what a checkpoint stores
  int replica_count = 1;
  bool partial_sum = false;  ///< not yet reduced over its replicas

  [[nodiscard]] std::int64_t num_elements() const;  ///< elements that this rank keeps
};

/// The whole tensor, held once.
[[nodiscard]] ShardSpec whole(std::string name, Shape shape, DType dtype);

/// Copies `local` (num_elements() values in the shard's order) to its places in `global` (row-major, global_shape).
void scatter_into(const ShardSpec& shard, const std::vector<double>& local, std::vector<double>& global);

}  // namespace tandem

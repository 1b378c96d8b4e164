// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/tensor.h"

namespace tandem {

/// What one rank holds of one global tensor: in each dimension a list of intervals, and the local tensor is the row-major tensor
/// of the indices that these pick, in order. The fused query-key-value weight of a tensor-parallel rank has three intervals of
/// columns, a zig-zag context slice two of tokens. A ZeRO shard is a flat range of the local tensor.
struct ShardSpec {
  std::string global_name;
  Shape global_shape;
  DType dtype = DType::f32;
  std::vector<std::vector<Interval>> slices;  ///< [dimensions]
  std::int64_t padded_rows = 0;        ///< rows at the end of the local tensor that belong to no global element; never trained
  std::optional<Interval> flat_range;  ///< elements of the local tensor that this rank really keeps; all when empty
  int replica_index = 0;               ///< replica 0 counts in norms and is what a checkpoint stores
  int replica_count = 1;
  bool partial_sum = false;  ///< not yet reduced over its replicas

  /// Extents of the local tensor, padding included, flat_range left aside.
  [[nodiscard]] Shape local_shape() const;
  [[nodiscard]] std::int64_t num_elements() const;  ///< elements that this rank keeps, padding included
  /// "[0:64, 0:16+64:80+128:144]"; "whole" where every dimension is.
  [[nodiscard]] std::string describe_slices() const;
  [[nodiscard]] bool is_whole() const;
};

/// The whole tensor, held once.
[[nodiscard]] ShardSpec whole(std::string name, Shape shape, DType dtype);

/// Flat global index of each element of the local tensor, in its order; -1 for padding. flat_range is applied.
[[nodiscard]] std::vector<std::int64_t> global_indices(const ShardSpec& shard);

/// Copies `local` (num_elements() values in the shard's order) to its places in `global` (row-major, global_shape); padding is
/// left out.
void scatter_into(const ShardSpec& shard, const std::vector<double>& local, std::vector<double>& global);

/// The inverse: this shard's elements of `global`; padding is 0.
[[nodiscard]] std::vector<double> gather_from(const ShardSpec& shard, const std::vector<double>& global);

}  // namespace tandem

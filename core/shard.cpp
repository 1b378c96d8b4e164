// SPDX-License-Identifier: Apache-2.0
#include "core/shard.h"

#include <fmt/format.h>

namespace tandem {
namespace {

std::int64_t box_elements(const Box& box) {
  std::int64_t count = 1;
  for (const Interval& interval : box) count *= interval.size();
  return count;
}

// Flat global index of element `index` (row-major) of `box`.
std::int64_t global_index(const Box& box, const Shape& shape, std::int64_t index) {
  std::int64_t result = 0;
  std::int64_t stride = 1;
  for (std::size_t dim = box.size(); dim-- > 0;) {
    const std::int64_t extent = box[dim].size();
    result += (box[dim].begin + index % extent) * stride;
    index /= extent;
    stride *= shape[dim];
  }
  return result;
}

}  // namespace

std::int64_t ShardSpec::num_elements() const {
  if (flat_range) return flat_range->size();
  std::int64_t count = 0;
  for (const Box& box : boxes) count += box_elements(box);
  return count;
}

ShardSpec whole(std::string name, Shape shape, DType dtype) {
  Box box;
  for (const std::int64_t extent : shape) box.push_back({0, extent});
  ShardSpec shard;
  shard.global_name = std::move(name);
  shard.global_shape = std::move(shape);
  shard.dtype = dtype;
  shard.boxes = {std::move(box)};
  return shard;
}

void scatter_into(const ShardSpec& shard, const std::vector<double>& local, std::vector<double>& global) {
  TANDEM_CHECK(static_cast<std::int64_t>(local.size()) == shard.num_elements(),
               fmt::format("{}: {} values for a shard of {}", shard.global_name, local.size(), shard.num_elements()));
  TANDEM_CHECK(static_cast<std::int64_t>(global.size()) == num_elements(shard.global_shape));
  const Interval kept = shard.flat_range.value_or(Interval{0, shard.num_elements()});
  std::int64_t position = 0;  // in the local tensor, all boxes
  for (const Box& box : shard.boxes) {
    const std::int64_t count = box_elements(box);
    for (std::int64_t i = 0; i < count; ++i, ++position) {
      if (position < kept.begin || position >= kept.end) continue;
      global[static_cast<std::size_t>(global_index(box, shard.global_shape, i))] =
          local[static_cast<std::size_t>(position - kept.begin)];
    }
  }
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "core/shard.h"

#include <algorithm>

#include <fmt/format.h>

namespace tandem {
namespace {

std::int64_t extent(const std::vector<Interval>& intervals) {
  std::int64_t count = 0;
  for (const Interval& interval : intervals) count += interval.size();
  return count;
}

// Global indices along one dimension, in local order.
std::vector<std::int64_t> picked(const std::vector<Interval>& intervals) {
  std::vector<std::int64_t> indices;
  for (const Interval& interval : intervals) {
    for (std::int64_t i = interval.begin; i < interval.end; ++i) indices.push_back(i);
  }
  return indices;
}

}  // namespace

Shape ShardSpec::local_shape() const {
  Shape shape;
  for (const auto& intervals : slices) shape.push_back(extent(intervals));
  if (!shape.empty()) shape.front() += padded_rows;
  return shape;
}

std::int64_t ShardSpec::num_elements() const { return flat_range ? flat_range->size() : tandem::num_elements(local_shape()); }

bool ShardSpec::is_whole() const {
  for (std::size_t dim = 0; dim < slices.size(); ++dim) {
    if (slices[dim].size() != 1 || slices[dim].front() != Interval{0, global_shape[dim]}) return false;
  }
  return padded_rows == 0 && !flat_range;
}

std::string ShardSpec::describe_slices() const {
  if (is_whole()) return "whole";
  std::string text;
  for (const auto& intervals : slices) {
    text += text.empty() ? "[" : ", ";
    for (std::size_t i = 0; i < intervals.size(); ++i) {
      text += fmt::format("{}{}:{}", i == 0 ? "" : "+", intervals[i].begin, intervals[i].end);
    }
  }
  text += "]";
  if (flat_range) text += fmt::format(" elements {}:{}", flat_range->begin, flat_range->end);
  return text;
}

ShardSpec whole(std::string name, Shape shape, DType dtype) {
  ShardSpec shard;
  for (const std::int64_t size : shape) shard.slices.push_back({{0, size}});
  shard.global_name = std::move(name);
  shard.global_shape = std::move(shape);
  shard.dtype = dtype;
  return shard;
}

std::vector<std::int64_t> global_indices(const ShardSpec& shard) {
  TANDEM_CHECK(
      shard.slices.size() == shard.global_shape.size(),
      fmt::format("{}: slices of {} dimensions, it has {}", shard.global_name, shard.slices.size(), shard.global_shape.size()));
  std::vector<std::int64_t> indices = {0};
  for (std::size_t dim = 0; dim < shard.slices.size(); ++dim) {
    const std::vector<std::int64_t> along = picked(shard.slices[dim]);
    std::vector<std::int64_t> next;
    next.reserve(indices.size() * along.size());
    for (const std::int64_t outer : indices) {
      for (const std::int64_t inner : along) next.push_back(outer * shard.global_shape[dim] + inner);
    }
    indices = std::move(next);
  }
  indices.resize(static_cast<std::size_t>(num_elements(shard.local_shape())), -1);
  if (!shard.flat_range) return indices;
  return {indices.begin() + shard.flat_range->begin, indices.begin() + shard.flat_range->end};
}

void scatter_into(const ShardSpec& shard, const std::vector<double>& local, std::vector<double>& global) {
  TANDEM_CHECK(static_cast<std::int64_t>(local.size()) == shard.num_elements(),
               fmt::format("{}: {} values for a shard of {}", shard.global_name, local.size(), shard.num_elements()));
  TANDEM_CHECK(static_cast<std::int64_t>(global.size()) == num_elements(shard.global_shape));
  const std::vector<std::int64_t> indices = global_indices(shard);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] >= 0) global[static_cast<std::size_t>(indices[i])] = local[i];
  }
}

std::vector<double> gather_from(const ShardSpec& shard, const std::vector<double>& global) {
  TANDEM_CHECK(static_cast<std::int64_t>(global.size()) == num_elements(shard.global_shape),
               fmt::format("{}: {} values for a tensor of {}", shard.global_name, global.size(), to_string(shard.global_shape)));
  std::vector<double> local;
  for (const std::int64_t index : global_indices(shard))
    local.push_back(index < 0 ? 0.0 : global[static_cast<std::size_t>(index)]);
  return local;
}

}  // namespace tandem

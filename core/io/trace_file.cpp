// SPDX-License-Identifier: Apache-2.0
#include "core/io/trace_file.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::array<std::string_view, 4> kKindNames = {"activation", "activation_gradient", "parameter", "parameter_gradient"};
constexpr std::int64_t kLargestExtent = std::int64_t{1} << 40;

// From [q, k, v][head][head_size] along the last dimension to [head][q, k, v][head_size].
std::vector<std::int64_t> heads_outermost(const std::vector<std::int64_t>& indices, std::int64_t width, std::int64_t head_size) {
  const std::int64_t heads = width / (3 * head_size);
  std::vector<std::int64_t> result(indices.size());
  for (std::size_t row = 0; row < indices.size(); row += static_cast<std::size_t>(width)) {
    std::size_t to = row;
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t which = 0; which < 3; ++which) {
        const std::int64_t from = (which * heads + head) * head_size;
        for (std::int64_t i = 0; i < head_size; ++i) result[to++] = indices[row + static_cast<std::size_t>(from + i)];
      }
    }
  }
  return result;
}

std::vector<std::int64_t> transposed(const std::vector<std::int64_t>& indices, std::int64_t rows, std::int64_t columns) {
  std::vector<std::int64_t> result;
  result.reserve(indices.size());
  for (std::int64_t column = 0; column < columns; ++column) {
    for (std::int64_t row = 0; row < rows; ++row) result.push_back(indices[static_cast<std::size_t>(row * columns + column)]);
  }
  return result;
}

[[noreturn]] void refuse(std::string_view where, const std::string& why) { throw InputError(fmt::format("{} {}", where, why)); }

void require_slices(const ShardSpec& shard, std::string_view where) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shard.global_shape) {
    if (extent < 1 || extent > kLargestExtent / count) {
      refuse(where, fmt::format("has shape {}, every extent must be at least 1 and their product at most 2^40",
                                to_string(shard.global_shape)));
    }
    count *= extent;
  }
  if (shard.slices.size() != shard.global_shape.size()) {
    refuse(where, fmt::format("has slices of {} dimensions, its shape {} has {}", shard.slices.size(),
                              to_string(shard.global_shape), shard.global_shape.size()));
  }
  for (std::size_t dim = 0; dim < shard.slices.size(); ++dim) {
    std::int64_t extent = 0;
    for (const Interval& slice : shard.slices[dim]) {
      if (slice.begin < 0 || slice.end < slice.begin || slice.end > shard.global_shape[dim]) {
        refuse(where, fmt::format("has slice [{}, {}) in dimension {} of extent {}", slice.begin, slice.end, dim,
                                  shard.global_shape[dim]));
      }
      extent += slice.size();
    }
    if (extent > shard.global_shape[dim]) refuse(where, fmt::format("picks indices of dimension {} more than once", dim));
  }
}

}  // namespace

std::string_view name(TraceKind kind) { return kKindNames[static_cast<std::size_t>(kind)]; }

std::optional<TraceKind> find_trace_kind(std::string_view name) {
  const auto* found = std::find(kKindNames.begin(), kKindNames.end(), name);
  if (found == kKindNames.end()) return {};
  return static_cast<TraceKind>(found - kKindNames.begin());
}

void require_possible(const TraceEntry& entry, std::int64_t head_size, std::string_view where) {
  const ShardSpec& shard = entry.shard;
  require_slices(shard, where);
  if (shard.padded_rows < 0 || shard.padded_rows > kLargestExtent || (shard.padded_rows > 0 && shard.slices.empty())) {
    refuse(where, fmt::format("has padded_rows {}", shard.padded_rows));
  }
  const Shape local = shard.local_shape();
  if (entry.megatron_qkv && (local.empty() || shard.padded_rows > 0 || local.back() % (3 * head_size) != 0)) {
    refuse(where, fmt::format("has layout megatron_qkv, but its local shape {} does not end in 3 x heads x head size {}",
                              to_string(local), head_size));
  }
  if (entry.transposed && (local.size() != 2 || shard.padded_rows > 0)) {
    refuse(where, fmt::format("is transposed, which a local shape {} with {} padded rows cannot be", to_string(local),
                              shard.padded_rows));
  }
  if (shard.flat_range &&
      (shard.flat_range->begin < 0 || shard.flat_range->size() < 0 || shard.flat_range->end > kLargestExtent)) {
    refuse(where, fmt::format("has flat_range [{}, {})", shard.flat_range->begin, shard.flat_range->end));
  }
}

std::int64_t num_elements(const TraceEntry& entry) { return entry.shard.num_elements(); }

std::vector<std::int64_t> global_indices(const TraceEntry& entry, std::int64_t head_size) {
  ShardSpec local = entry.shard;
  local.flat_range.reset();
  std::vector<std::int64_t> indices = global_indices(local);
  const Shape shape = local.local_shape();
  if (entry.megatron_qkv) {
    TANDEM_CHECK(!shape.empty() && head_size > 0 && shape.back() % (3 * head_size) == 0);
    indices = heads_outermost(indices, shape.back(), head_size);
  }
  if (entry.transposed) {
    TANDEM_CHECK(shape.size() == 2);
    indices = transposed(indices, shape[0], shape[1]);
  }
  if (!entry.shard.flat_range) return indices;
  const auto total = static_cast<std::int64_t>(indices.size());
  const std::int64_t begin = std::min(entry.shard.flat_range->begin, total);
  const std::int64_t end = std::min(entry.shard.flat_range->end, total);
  std::vector<std::int64_t> kept(indices.begin() + begin, indices.begin() + end);
  kept.resize(static_cast<std::size_t>(entry.shard.flat_range->size()), -1);
  return kept;
}

TraceEntry whole_entry(std::string name, TraceKind kind, Shape shape, DType dtype) {
  TraceEntry entry;
  entry.shard = whole(name, std::move(shape), dtype);
  entry.name = std::move(name);
  entry.kind = kind;
  return entry;
}

}  // namespace tandem

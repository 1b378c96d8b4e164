// SPDX-License-Identifier: Apache-2.0
#include "core/shard_runs.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace tandem {
namespace {

// One dimension of a shard: its intervals without empty ones, neighbours joined.
struct Picks {
  std::vector<Interval> intervals;
  std::int64_t extent = 0;
  std::int64_t global_extent = 0;

  [[nodiscard]] bool is_whole() const { return intervals.size() == 1 && intervals.front() == Interval{0, global_extent}; }
  // Global index of local index `local`.
  [[nodiscard]] std::int64_t at(std::int64_t local) const {
    for (const Interval& interval : intervals) {
      if (local < interval.size()) return interval.begin + local;
      local -= interval.size();
    }
    return -1;
  }
};

void require_disjoint(std::vector<Interval> intervals, const ShardSpec& shard) {
  std::ranges::sort(intervals, {}, &Interval::begin);
  for (std::size_t i = 1; i < intervals.size(); ++i) {
    TANDEM_CHECK(intervals[i - 1].end <= intervals[i].begin,
                 fmt::format("{}: slices {} overlap", shard.global_name, shard.describe_slices()));
  }
}

std::vector<Picks> picks_of(const ShardSpec& shard) {
  TANDEM_CHECK(
      shard.slices.size() == shard.global_shape.size(),
      fmt::format("{}: slices of {} dimensions, it has {}", shard.global_name, shard.slices.size(), shard.global_shape.size()));
  std::vector<Picks> all;
  for (std::size_t dim = 0; dim < shard.slices.size(); ++dim) {
    Picks picks;
    picks.global_extent = shard.global_shape[dim];
    for (const Interval& interval : shard.slices[dim]) {
      TANDEM_CHECK(
          interval.begin >= 0 && interval.begin <= interval.end && interval.end <= picks.global_extent,
          fmt::format("{}: slices {} leave {}", shard.global_name, shard.describe_slices(), to_string(shard.global_shape)));
      if (interval.size() == 0) continue;
      picks.extent += interval.size();
      if (!picks.intervals.empty() && picks.intervals.back().end == interval.begin) {
        picks.intervals.back().end = interval.end;
      } else {
        picks.intervals.push_back(interval);
      }
    }
    require_disjoint(picks.intervals, shard);
    all.push_back(std::move(picks));
  }
  return all;
}

// Runs of the local elements `kept`, in local order.
class Runs {
 public:
  explicit Runs(Interval kept) : kept_(kept) {}

  void add(std::int64_t global, std::int64_t local, std::int64_t count) {
    const std::int64_t begin = std::max(local, kept_.begin);
    const std::int64_t end = std::min(local + count, kept_.end);
    if (begin >= end) return;
    const ShardRun run{global + begin - local, begin - kept_.begin, end - begin};
    ShardRun* const last = runs.empty() ? nullptr : &runs.back();
    if (last != nullptr && last->global + last->count == run.global && last->local + last->count == run.local) {
      last->count += run.count;
    } else {
      runs.push_back(run);
    }
  }

  std::vector<ShardRun> runs;

 private:
  Interval kept_;
};

}  // namespace

std::vector<ShardRun> shard_runs(const ShardSpec& shard) {
  const std::vector<Picks> picks = picks_of(shard);
  std::int64_t elements = 1;  // that are no padding
  for (const Picks& dimension : picks) elements *= dimension.extent;
  const std::int64_t stored = num_elements(shard.local_shape());
  const Interval kept = shard.flat_range.value_or(Interval{0, stored});
  TANDEM_CHECK(kept.begin >= 0 && kept.begin <= kept.end && kept.end <= stored,
               fmt::format("{}: elements {}:{} leave its {}", shard.global_name, kept.begin, kept.end, stored));

  // Dimensions behind the last one that is cut are whole: what is next to each other there is so everywhere.
  std::size_t cut = picks.size();
  std::int64_t inner = 1;
  while (cut > 0 && picks[cut - 1].is_whole()) inner *= picks[--cut].extent;
  Runs result({kept.begin, std::min(kept.end, elements)});
  if (elements == 0 || kept.begin >= elements) return {};
  if (cut == 0) {
    result.add(0, 0, elements);
    return std::move(result.runs);
  }
  const Picks& last = picks[cut - 1];
  const std::int64_t row = last.extent * inner;  // local elements of one index of the dimensions outside
  for (std::int64_t outer = kept.begin / row; outer * row < std::min(kept.end, elements); ++outer) {
    std::int64_t global = 0;
    std::int64_t rest = outer;
    std::int64_t stride = last.global_extent * inner;
    for (std::size_t dim = cut - 1; dim-- > 0;) {
      global += picks[dim].at(rest % picks[dim].extent) * stride;
      rest /= picks[dim].extent;
      stride *= picks[dim].global_extent;
    }
    std::int64_t local = outer * row;
    for (const Interval& interval : last.intervals) {
      result.add(global + interval.begin * inner, local, interval.size() * inner);
      local += interval.size() * inner;
    }
  }
  if (!std::ranges::is_sorted(result.runs, {}, &ShardRun::global)) std::ranges::sort(result.runs, {}, &ShardRun::global);
  return std::move(result.runs);
}

std::int64_t num_elements(std::span<const ShardRun> runs) noexcept {
  std::int64_t count = 0;
  for (const ShardRun& run : runs) count += run.count;
  return count;
}

void for_each_common(std::span<const ShardRun> source_runs, std::span<const ShardRun> target_runs,
                     const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& visit) {
  if (source_runs.empty() || target_runs.empty()) return;
  const auto end_of = [](const ShardRun& run) { return run.global + run.count; };
  // Of two shards that have little in common, most runs lie before the first of the other.
  const auto first_behind = [&](std::span<const ShardRun> runs, std::int64_t global) {
    return std::ranges::upper_bound(runs, global, {}, end_of);
  };
  auto source = first_behind(source_runs, target_runs.front().global);
  auto target = first_behind(target_runs, source_runs.front().global);
  while (source != source_runs.end() && target != target_runs.end()) {
    const std::int64_t begin = std::max(source->global, target->global);
    const std::int64_t end = std::min(end_of(*source), end_of(*target));
    if (begin < end) visit(source->local + begin - source->global, target->local + begin - target->global, end - begin);
    if (end_of(*source) <= end_of(*target)) {
      ++source;
    } else {
      ++target;
    }
  }
}

std::int64_t copy_common(std::span<const ShardRun> source_runs, std::span<const std::byte> source,
                         std::span<const ShardRun> target_runs, std::span<std::byte> target, std::size_t element_bytes) {
  std::int64_t copied = 0;
  for_each_common(source_runs, target_runs, [&](std::int64_t from, std::int64_t to, std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * element_bytes;
    const std::size_t from_byte = static_cast<std::size_t>(from) * element_bytes;
    const std::size_t to_byte = static_cast<std::size_t>(to) * element_bytes;
    TANDEM_CHECK(from_byte + bytes <= source.size() && to_byte + bytes <= target.size(),
                 fmt::format("elements {}:{} of {} bytes to {}:{} of {} bytes", from, from + count, source.size(), to, to + count,
                             target.size()));
    std::memcpy(target.data() + to_byte, source.data() + from_byte, bytes);
    copied += count;
  });
  return copied;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "harness/interval_set.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tandem {

IntervalSet::IntervalSet(std::vector<Interval> intervals) {
  std::erase_if(intervals, [](const Interval& interval) { return interval.end <= interval.begin; });
  std::ranges::sort(intervals, {}, &Interval::begin);
  for (const Interval& interval : intervals) {
    if (!intervals_.empty() && interval.begin <= intervals_.back().end) {
      intervals_.back().end = std::max(intervals_.back().end, interval.end);
    } else {
      intervals_.push_back(interval);
    }
  }
}

std::int64_t IntervalSet::length() const noexcept {
  std::int64_t total = 0;
  for (const Interval& interval : intervals_) total += interval.size();
  return total;
}

bool IntervalSet::contains(std::int64_t point) const noexcept {
  const auto after = std::ranges::upper_bound(intervals_, point, {}, &Interval::begin);
  return after != intervals_.begin() && point < std::prev(after)->end;
}

IntervalSet IntervalSet::united(const IntervalSet& other) const {
  std::vector<Interval> all = intervals_;
  all.insert(all.end(), other.intervals_.begin(), other.intervals_.end());
  return IntervalSet(std::move(all));
}

IntervalSet IntervalSet::intersected(const IntervalSet& other) const {
  std::vector<Interval> common;
  auto mine = intervals_.begin();
  auto theirs = other.intervals_.begin();
  while (mine != intervals_.end() && theirs != other.intervals_.end()) {
    const Interval overlap{std::max(mine->begin, theirs->begin), std::min(mine->end, theirs->end)};
    if (overlap.begin < overlap.end) common.push_back(overlap);
    (mine->end < theirs->end ? mine : theirs)++;
  }
  return IntervalSet(std::move(common));
}

IntervalSet IntervalSet::without(const IntervalSet& other) const {
  std::vector<Interval> left;
  auto theirs = other.intervals_.begin();
  for (Interval rest : intervals_) {
    while (theirs != other.intervals_.end() && theirs->end <= rest.begin) ++theirs;
    for (auto cut = theirs; cut != other.intervals_.end() && cut->begin < rest.end; ++cut) {
      if (rest.begin < cut->begin) left.push_back({rest.begin, cut->begin});
      rest.begin = std::min(rest.end, std::max(rest.begin, cut->end));
    }
    if (rest.begin < rest.end) left.push_back(rest);
  }
  return IntervalSet(std::move(left));
}

}  // namespace tandem

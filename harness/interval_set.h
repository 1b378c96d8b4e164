// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/batch.h"

namespace tandem {

/// A set of points in time: disjoint, sorted, non-empty half-open intervals. A value.
class IntervalSet {
 public:
  IntervalSet() = default;
  /// The union of `intervals`: overlapping and touching ones merge, empty ones vanish.
  explicit IntervalSet(std::vector<Interval> intervals);

  [[nodiscard]] const std::vector<Interval>& intervals() const noexcept { return intervals_; }
  [[nodiscard]] std::int64_t length() const noexcept;
  [[nodiscard]] bool contains(std::int64_t point) const noexcept;

  [[nodiscard]] IntervalSet united(const IntervalSet& other) const;
  [[nodiscard]] IntervalSet intersected(const IntervalSet& other) const;
  /// The points of this set that are not in `other`.
  [[nodiscard]] IntervalSet without(const IntervalSet& other) const;

 private:
  std::vector<Interval> intervals_;
};

}  // namespace tandem

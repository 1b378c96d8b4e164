// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

namespace tandem {

/// The last values of a number, and how unusual another one is:
///
///   z(x) = (x - median) / max(1.4826 MAD, floor),   MAD = median |x_i - median|
///
/// 1.4826 MAD is the standard deviation where values are normal; half of the values may be anything (Rousseeuw & Croux 1993).
/// `floor` is `relative_floor` |median|, or `least_spread` where that is more: where a window happens to be still, rounding is no
/// finding. What is added should be what was not suspicious: one spike does not move the median, a plateau of them does.
class RobustWindow {
 public:
  RobustWindow(std::int64_t size, double relative_floor, double least_spread = 0)
      : size_(size), relative_floor_(relative_floor), least_spread_(least_spread) {}

  void add(double value);
  void clear() noexcept { values_.clear(); }
  [[nodiscard]] std::int64_t count() const noexcept { return static_cast<std::int64_t>(values_.size()); }
  /// Nothing while fewer than `least` values are there. Infinite for a value that is not finite.
  [[nodiscard]] std::optional<double> z(double value, std::int64_t least = 8) const;
  /// 0 where there are none.
  [[nodiscard]] double median() const;
  [[nodiscard]] const std::deque<double>& values() const noexcept { return values_; }
  /// As saved: for resume.
  void assign(std::deque<double> values) { values_ = std::move(values); }

 private:
  std::int64_t size_;
  double relative_floor_, least_spread_;
  std::deque<double> values_;
};

}  // namespace tandem

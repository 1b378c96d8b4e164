// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/robust_window.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace tandem {
namespace {

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto upper = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, upper);
  if (values.size() % 2 == 1) return *upper;
  return (*std::max_element(values.begin(), upper) + *upper) / 2;
}

}  // namespace

void RobustWindow::add(double value) {
  values_.push_back(value);
  while (count() > size_) values_.pop_front();
}

std::optional<double> RobustWindow::z(double value, std::int64_t least) const {
  if (count() < std::max<std::int64_t>(least, 1)) return std::nullopt;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (!std::isfinite(value)) return value < 0 ? -kInfinity : kInfinity;
  const double middle = median();
  std::vector<double> deviations;
  deviations.reserve(values_.size());
  for (const double x : values_) deviations.push_back(std::abs(x - middle));
  const double spread = std::max({1.4826 * median_of(std::move(deviations)), relative_floor_ * std::abs(middle), least_spread_});
  const double deviation = value - middle;
  if (deviation == 0) return 0.0;
  return deviation / spread;  // infinite where nothing in the window has ever moved and there is no floor
}

double RobustWindow::median() const { return median_of({values_.begin(), values_.end()}); }

}  // namespace tandem

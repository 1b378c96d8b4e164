// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/robust_window.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/quantile.h"

namespace tandem {
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
  const double spread =
      std::max({1.4826 * tandem::median(std::move(deviations)), relative_floor_ * std::abs(middle), least_spread_});
  const double deviation = value - middle;
  if (deviation == 0) return 0.0;
  return deviation / spread;  // infinite where nothing in the window has ever moved and there is no floor
}

double RobustWindow::median() const { return values_.empty() ? 0 : tandem::median({values_.begin(), values_.end()}); }

}  // namespace tandem

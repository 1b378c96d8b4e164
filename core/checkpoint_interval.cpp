// SPDX-License-Identifier: Apache-2.0
#include "core/checkpoint_interval.h"

#include <cmath>

namespace tandem {

double young_interval_seconds(const CheckpointCosts& costs) { return std::sqrt(2 * costs.save_seconds * costs.failure_seconds); }

double daly_interval_seconds(const CheckpointCosts& costs) {
  const double d = costs.save_seconds;
  const double m = costs.failure_seconds;
  if (d >= 2 * m) return m;
  return std::sqrt(2 * d * m) * (1 + std::sqrt(d / (2 * m)) / 3 + d / (18 * m)) - d;
}

double goodput(const CheckpointCosts& costs, double interval_seconds) {
  const double m = costs.failure_seconds;
  const double t = interval_seconds;
  return t / (m * std::exp(costs.restart_seconds / m) * std::expm1((t + costs.save_seconds) / m));
}

}  // namespace tandem

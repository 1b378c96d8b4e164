// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/activation_ranges.h"

#include <algorithm>
#include <cmath>

namespace tandem {

void ActivationRanges::see(int layer, const TensorLook& output) {
  double& largest = now_[layer];
  largest = std::max(largest, output.largest);
}

std::optional<ActivationRanges::Excess> ActivationRanges::lowest_excess() const {
  for (const auto& [layer, largest] : now_) {
    double limit = 0;
    const auto before = before_.find(layer);
    if (before != before_.end() && before->second.size() >= kLeastSamples)
      limit = kRatio * std::max(1.0, *std::ranges::max_element(before->second));
    if (!std::isfinite(largest) || (limit > 0 && largest > limit)) return Excess{layer, largest, limit};
  }
  return std::nullopt;
}

void ActivationRanges::accept() {
  for (const auto& [layer, largest] : now_) {
    std::deque<double>& samples = before_[layer];
    samples.push_back(largest);
    if (samples.size() > kSamples) samples.pop_front();
  }
  now_.clear();
}

}  // namespace tandem

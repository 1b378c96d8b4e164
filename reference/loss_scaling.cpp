// SPDX-License-Identifier: Apache-2.0
#include "reference/loss_scaling.h"

#include <limits>

namespace tandem::reference {

bool DynamicLossScaler::finish_step(bool overflowed) noexcept {
  if (overflowed) {
    scale_ *= config_.backoff_factor;
    growth_tracker_ = 0;
    return false;
  }
  ++growth_tracker_;
  if (growth_tracker_ == config_.growth_interval) {
    const double grown = scale_ * config_.growth_factor;
    if (grown <= static_cast<double>(std::numeric_limits<float>::max())) scale_ = grown;
    growth_tracker_ = 0;
  }
  return true;
}

}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tandem::reference {

struct LossScalerConfig {
  double initial_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  ///< steps without overflow before the scale grows
};

/// Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018), by the rules of torch.cuda.amp.GradScaler:
///   overflow:  skip the update, scale <- scale * backoff_factor, counter <- 0
///   otherwise: counter += 1; when counter *equals* growth_interval: scale <- scale * growth_factor, counter <- 0
/// The scale is not grown past the largest float. It has no lower bound.
class DynamicLossScaler {
 public:
  explicit DynamicLossScaler(const LossScalerConfig& config = {}) : config_(config), scale_(config.initial_scale) {}

  /// Multiply the loss by this; divide the gradients by it.
  [[nodiscard]] double scale() const noexcept { return scale_; }
  [[nodiscard]] std::int64_t growth_tracker() const noexcept { return growth_tracker_; }

  /// Ends a step whose gradients did (`overflowed`) or did not contain Inf or NaN. True: apply the update; false: skip it.
  [[nodiscard]] bool finish_step(bool overflowed) noexcept;

 private:
  LossScalerConfig config_;
  double scale_;
  std::int64_t growth_tracker_ = 0;
};

}  // namespace tandem::reference

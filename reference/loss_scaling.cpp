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

bool LiteralLossScaler::finish_step(bool overflowed) noexcept {
  if (overflowed) {
    scale_ /= 2.0;
    return false;
  }
  ++stable_steps_;
  if (stable_steps_ > growth_interval_) scale_ *= 2.0;
  return true;
}

LossScaler::LossScaler(const LossScaleConfig& config, const Numerics& numerics) {
  TrainingPlan plan;
  plan.numerics = numerics;
  plan.loss_scale = config;
  if (scales_loss_dynamically(plan)) {
    dynamic_.emplace(LossScalerConfig{config.initial, config.growth_factor, config.backoff_factor, config.growth_interval});
  } else if (scales_loss(plan)) {
    fixed_.emplace(config.initial);
  }
}

double LossScaler::scale() const noexcept {
  if (dynamic_) return dynamic_->scale();
  return fixed_ ? fixed_->scale() : 1.0;
}

std::int64_t LossScaler::growth_tracker() const noexcept { return dynamic_ ? dynamic_->growth_tracker() : 0; }

bool LossScaler::finish_step(bool overflowed) noexcept {
  if (dynamic_) return dynamic_->finish_step(overflowed);
  return fixed_ ? fixed_->finish_step(overflowed) : true;
}

}  // namespace tandem::reference

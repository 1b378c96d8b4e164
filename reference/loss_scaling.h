// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "core/dtype.h"
#include "core/plan.h"

/// Loss scaling: the gradient that leaves the loss is multiplied by a scale so that small gradients do not vanish in 16 bits, and
/// the parameters' gradients are divided by it before anything looks at them.
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

/// One scale for the whole run; an overflow skips the update and changes nothing else.
class StaticLossScaler {
 public:
  explicit StaticLossScaler(double scale) : scale_(scale) {}

  [[nodiscard]] double scale() const noexcept { return scale_; }
  [[nodiscard]] bool finish_step(bool overflowed) noexcept { return !overflowed; }

 private:
  double scale_;
};

/// Evidence for a claim, not for use: dynamic loss scaling as a widespread sketch writes it down,
///   overflow:  skip the update, scale <- scale / 2
///   otherwise: counter += 1; when counter *exceeds* growth_interval: scale <- scale * 2
/// in which nothing ever resets the counter. Once it has passed the interval, the scale doubles at *every* step without overflow,
/// until it overflows; from then on about every second step is skipped.
class LiteralLossScaler {
 public:
  explicit LiteralLossScaler(double initial_scale = 65536.0, std::int64_t growth_interval = 2000)
      : scale_(initial_scale), growth_interval_(growth_interval) {}

  [[nodiscard]] double scale() const noexcept { return scale_; }
  [[nodiscard]] std::int64_t stable_steps() const noexcept { return stable_steps_; }
  [[nodiscard]] bool finish_step(bool overflowed) noexcept;

 private:
  double scale_;
  std::int64_t growth_interval_;
  std::int64_t stable_steps_ = 0;
};

/// What a plan asks for: no scaler (mode none, or auto without fp16), a static or a dynamic one.
class LossScaler {
 public:
  LossScaler(const LossScaleConfig& config, const Numerics& numerics);

  /// 1 without a scaler.
  [[nodiscard]] double scale() const noexcept;
  /// 0 without a dynamic scaler.
  [[nodiscard]] std::int64_t growth_tracker() const noexcept;
  /// As DynamicLossScaler; without a scaler nobody looks for overflows and every update is applied.
  [[nodiscard]] bool finish_step(bool overflowed) noexcept;

 private:
  std::optional<StaticLossScaler> fixed_;
  std::optional<DynamicLossScaler> dynamic_;
};

}  // namespace tandem::reference

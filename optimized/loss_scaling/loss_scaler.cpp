// SPDX-License-Identifier: Apache-2.0
#include "optimized/loss_scaling/loss_scaler.h"

#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

// What multiplies the loss must be finite in fp32.
constexpr double kLargestScale = std::numeric_limits<float>::max();

}  // namespace

LossScaler::LossScaler(const LossScaleConfig& config, bool dynamic, bool enabled, const PitfallSet& pitfalls)
    : config_(config), dynamic_(dynamic), enabled_(enabled), pitfalls_(pitfalls) {
  if (!enabled_) return;
  TANDEM_CHECK(config.initial > 0 && config.initial <= kLargestScale, fmt::format("initial scale {}", config.initial));
  TANDEM_CHECK(config.growth_factor > 1 && std::isfinite(config.growth_factor),
               fmt::format("growth factor {}", config.growth_factor));
  TANDEM_CHECK(config.backoff_factor > 0 && config.backoff_factor < 1, fmt::format("backoff factor {}", config.backoff_factor));
  TANDEM_CHECK(config.growth_interval >= 1, fmt::format("growth interval {}", config.growth_interval));
  state_.scale = config.initial;
}

bool LossScaler::finish_step(bool overflowed) {
  if (!enabled_) return true;
  if (overflowed) ++state_.skipped_steps;
  if (dynamic_ && overflowed) {
    state_.scale *= config_.backoff_factor;
    if (!pitfalls_.on(Pitfall::overflow_keeps_growth_count)) state_.growth_tracker = 0;
  } else if (dynamic_) {
    grow();
  }
  return !overflowed;
}

void LossScaler::grow() {
  ++state_.growth_tracker;
  // A resumed run may have a shorter interval than the run that counted so far: a test for equality would then never hold.
  const std::int64_t due = config_.growth_interval + (pitfalls_.on(Pitfall::growth_count_exceeds) ? 1 : 0);
  if (state_.growth_tracker < due) return;
  state_.growth_tracker = 0;
  const double grown = state_.scale * config_.growth_factor;
  if (grown <= kLargestScale) state_.scale = grown;
}

void LossScaler::set_state(const LossScalerState& state) {
  TANDEM_CHECK(
      state.scale >= 0 && state.scale <= kLargestScale && state.growth_tracker >= 0 && state.skipped_steps >= 0,
      fmt::format("loss scale {}, growth tracker {}, skipped steps {}", state.scale, state.growth_tracker, state.skipped_steps));
  state_.skipped_steps = state.skipped_steps;
  if (!dynamic()) return;
  state_.scale = state.scale;
  state_.growth_tracker = state.growth_tracker;
}

}  // namespace tandem

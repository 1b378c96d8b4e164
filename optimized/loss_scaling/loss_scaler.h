// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/pitfall.h"
#include "core/plan.h"

namespace tandem {

/// What a checkpoint keeps of a LossScaler.
struct LossScalerState {
  double scale = 1.0;
  std::int64_t growth_tracker = 0;  ///< steps without overflow since the scale last changed
  std::int64_t skipped_steps = 0;   ///< of the whole run
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;
};

/// The scale S by which a step multiplies its loss, so that small gradients survive in 16 bits; they are divided by it again
/// before clipping and update (Micikevicius et al., "Mixed precision training", 2018). Dynamic:
///
///   overflow    the update is skipped, S <- S * backoff_factor, tracker <- 0
///   otherwise   tracker <- tracker + 1; when it reaches growth_interval: S <- S * growth_factor, tracker <- 0
///
/// S stays where it is, and the tracker starts again, where growing would take it beyond the largest float. It has no lower
/// bound. Static: S never changes, an overflow skips the update. Off: S is 1 and no step is skipped; whether gradients that are
/// not finite then end the run is the caller's business.
///
/// Holds no communicator: `overflowed` must be what all ranks of the world agreed on, then all of them keep the same state.
class LossScaler {
 public:
  /// Throws ContractError where the rule makes no sense: initial <= 0, growth_factor <= 1, backoff_factor outside (0, 1),
  /// growth_interval < 1. `dynamic` has no effect without `enabled`.
  LossScaler(const LossScaleConfig& config, bool dynamic, bool enabled, const PitfallSet& pitfalls = {});

  /// What the step that comes next multiplies its loss by, and divides its gradients by.
  [[nodiscard]] double scale() const noexcept { return state_.scale; }
  [[nodiscard]] std::int64_t growth_tracker() const noexcept { return state_.growth_tracker; }
  [[nodiscard]] std::int64_t skipped_steps() const noexcept { return state_.skipped_steps; }
  [[nodiscard]] bool enabled() const noexcept { return enabled_; }
  [[nodiscard]] bool dynamic() const noexcept { return enabled_ && dynamic_; }

  /// Ends a step whose gradients did (`overflowed`) or did not have an element that is not finite, on any rank. True: apply the
  /// update. Call it once a step, after everything that needs this step's scale.
  [[nodiscard]] bool finish_step(bool overflowed);

  /// A step whose update was left out for another reason than an overflow: the scale knows nothing of it, the schedule does.
  void count_skipped_step() noexcept { ++state_.skipped_steps; }

  [[nodiscard]] const LossScalerState& state() const noexcept { return state_; }
  /// Goes on from a saved state. A static scale or none comes from the plan, not from the checkpoint: only the number of skipped
  /// steps is taken over. Throws ContractError for a state that no scaler can have had.
  void set_state(const LossScalerState& state);

 private:
  void grow();

  LossScaleConfig config_;
  bool dynamic_;
  bool enabled_;
  PitfallSet pitfalls_;
  LossScalerState state_;
};

}  // namespace tandem

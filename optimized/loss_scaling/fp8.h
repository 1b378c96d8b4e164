// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/pitfall.h"
#include "core/plan.h"
#include "optimized/comm/communicator.h"

namespace tandem {

/// Operands of a linear layer: its input and its weight, and the gradient of its output.
enum class Fp8Operand : std::uint8_t { x, w, dy };

/// The linear layers of a block, in the order of the forward pass.
enum class Fp8Linear : std::uint8_t { c_attn, attn_c_proj, c_fc, mlp_c_proj };

/// One tensor that is quantised: `layer` counts over the whole model.
struct Fp8Slot {
  int layer = 0;
  Fp8Linear linear = Fp8Linear::c_attn;
  Fp8Operand operand = Fp8Operand::x;
  friend bool operator==(const Fp8Slot&, const Fp8Slot&) = default;
};

/// Slots of one layer: its linear layers times their operands.
inline constexpr int kFp8SlotsOfLayer = 12;

/// e4m3 for x and w, e5m2 for dy, whose range matters more than its precision.
[[nodiscard]] Fp8Format format_of(Fp8Operand operand) noexcept;

/// The largest power of two that takes values up to `amax` to at most largest(format), less `margin` powers of two:
/// 2^(floor(log2(largest(format) / amax)) - margin). 1 where amax is 0.
[[nodiscard]] double fp8_scale(Fp8Format format, double amax, int margin);

/// What a checkpoint keeps of an Fp8Scaling.
struct Fp8ScalingState {
  std::vector<double> histories;  ///< [layers, linear layers of a block, operands, history]; 0 where nothing was observed
  std::int64_t position = 0;      ///< of the last dimension: where the next step's entry goes
  friend bool operator==(const Fp8ScalingState&, const Fp8ScalingState&) = default;
};

/// Delayed scaling of fp8 operands: the scale of a tensor is fp8_scale of the largest magnitude in its last `history` steps, so
/// that it is known before the tensor is (Micikevicius et al., "FP8 formats for deep learning", 2022). Values beyond what the
/// history knew saturate, for one step.
///
/// Every rank holds the slots of the whole model, of which it observes those that it computes; end_step agrees on the rest, so
/// that all copies and shards of a tensor have the same scale.
class Fp8Scaling {
 public:
  /// Throws ContractError where config.history < 1 or layers < 0.
  Fp8Scaling(const Fp8Config& config, int layers, const PitfallSet& pitfalls = {});

  /// The scale of this step: it follows from earlier steps, and changes in end_step alone.
  [[nodiscard]] double scale(const Fp8Slot& slot) const;

  /// The largest magnitude of one quantised tensor, before scaling. Of the calls of one step the largest counts. One that is not
  /// finite is left out, or its scale would be 0 for `history` steps; that the step overflowed, its gradients tell.
  void observe(const Fp8Slot& slot, double amax);

  /// Moves what was observed into the histories. Collective over `world` (all ranks that hold a part of the model), which may be
  /// null where there is one rank. A slot that no rank observed gets a 0, which counts as no entry.
  void end_step(Communicator* world, int step = -1);

  /// What was observed since the last end_step() belongs to a step that is computed again.
  void forget_step() { std::fill(current_.begin(), current_.end(), 0.0); }

  [[nodiscard]] Fp8ScalingState state() const { return {histories_, position_}; }
  /// Goes on from a saved state. Throws InputError where it was made for another model or history length.
  void set_state(const Fp8ScalingState& state);

 private:
  [[nodiscard]] std::size_t index(const Fp8Slot& slot) const;
  [[nodiscard]] std::vector<double> agreed(Communicator& world, int step) const;

  Fp8Config config_;
  int layers_;
  PitfallSet pitfalls_;
  std::vector<double> current_;    ///< [slots] largest magnitudes of this step
  std::vector<double> histories_;  ///< [slots, history], a ring
  std::int64_t position_ = 0;
};

}  // namespace tandem

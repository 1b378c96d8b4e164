// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tandem {

/// What a rank knows of a step when its gradients are complete and nothing has been changed yet.
struct UpdateSigns {
  std::int64_t step = 0;
  double loss_sum = 0;            ///< of this rank's tokens: each token is counted on one rank of the world
  std::int64_t valid_tokens = 0;  ///< of the global batch
  double gradient_norm = 0;       ///< of the whole model, of the unscaled loss; the same on all ranks
  bool gradient_is_finite =
      true;  ///< this rank's own, before it was summed with others': where a fault began. True where not known
  double clip_coefficient = 1;
};

/// What is to be done with the update. The same on all ranks.
struct UpdateDecision {
  enum class Kind : std::uint8_t {
    apply,
    skip,   ///< as if the loss scaler had found an overflow: schedule and moments do not count it
    retry,  ///< leave everything as it was: the step is computed again
  } kind = Kind::apply;
  double clip_factor = 1;  ///< on top of the clip coefficient; 1 changes no bit
};

}  // namespace tandem

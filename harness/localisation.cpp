// SPDX-License-Identifier: Apache-2.0
#include "harness/localisation.h"

#include <cmath>

#include <fmt/format.h>

namespace tandem {

std::string describe(const Localisation& localisation) {
  const std::string how =
      localisation.operation.empty() ? localisation.phase : fmt::format("{}, {}", localisation.operation, localisation.phase);
  const std::string excess = std::isfinite(localisation.error_over_bound)
                                 ? fmt::format("= {:.2g} x bound", localisation.error_over_bound)
                                 : fmt::format("beyond bound {:.2g}", localisation.bound);
  return fmt::format("starts at {} ({}), rank {}, micro-batch {}, {}: error {:.2g} {}", localisation.tensor, how,
                     localisation.rank, localisation.micro_batch, localisation.slice, localisation.error, excess);
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "harness/case.h"

namespace tandem {

/// The whole training loop in fp64, on two data ranks with dropout, beside the reference's.
[[nodiscard]] Case training_pair_case();

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "harness/case.h"

namespace tandem {

/// An identity: `value` must be `expected`.
[[nodiscard]] inline Property exactly(const std::string& name, double value, double expected, const std::string& derivation) {
  return {name, value, Relation::equal, expected, derivation, -1, ""};
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "harness/pitfall_report.h"

namespace tandem {

/// suites/pitfalls.json, which travels inside the program.
[[nodiscard]] std::vector<PitfallInfo> known_pitfalls();

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "suites/pitfalls.h"

#include "tandem_pitfalls_json.h"

namespace tandem {

std::vector<PitfallInfo> known_pitfalls() { return pitfalls_from_json(kPitfallsJson, "suites/pitfalls.json"); }

}  // namespace tandem

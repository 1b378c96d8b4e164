// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "core/world_settings.h"
#include "optimized/comm/communicator.h"

namespace tandem {

/// The bytes of every rank, of any length each, in order of ranks. Collective.
[[nodiscard]] std::vector<std::string> all_gather_bytes(Communicator& comm, const std::string& own);

/// The same over all processes of the job, in a world of their own; where the ranks are threads of this one, it is alone. Outside
/// of worlds.
[[nodiscard]] std::vector<std::string> all_gather_bytes(const WorldSettings& settings, const std::string& own);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>

#include "core/world_settings.h"
#include "optimized/comm/communicator.h"
#include "optimized/comm/group.h"

namespace tandem {

/// Runs the body of one rank with a communicator over `group`, wrapped where the settings name an adversary. Afterwards the world
/// knows that the rank has ended, or that it failed and of what. Returns what the body threw; null: nothing.
[[nodiscard]] std::exception_ptr run_rank(const std::shared_ptr<Group>& group, const WorldSettings& settings,
                                          const std::function<void(Communicator&)>& body) noexcept;

}  // namespace tandem

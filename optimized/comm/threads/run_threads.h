// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "optimized/comm/world.h"

namespace tandem {

/// run_world() of the threads transport.
void run_threads(const WorldOptions& options, const std::function<void(Communicator&)>& body);

}  // namespace tandem

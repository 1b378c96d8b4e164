// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/world_settings.h"
#include "optimized/comm/wire.h"
#include "optimized/comm/world_state.h"

namespace tandem {

/// The wires of all ranks of a world whose ranks are threads of this process. The bytes go straight from buffer to buffer, once
/// both ends have been posted, by the hand of whoever looks first. With a link each message is complete when the link's model
/// says so (link_model.h): a send once its bytes have left, a receive once they have arrived. Until then its thread sleeps.
///
/// A message sets off when its sender posts it, whether the receiver has come or not, as if the receiver's node had room for it.
[[nodiscard]] std::vector<std::unique_ptr<Wire>> make_threads_wires(const std::shared_ptr<WorldState>& world,
                                                                    const std::optional<LinkProfile>& link);

}  // namespace tandem

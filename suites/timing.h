// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/step_program.h"
#include "core/world_settings.h"
#include "harness/case.h"

namespace tandem {

/// Why nothing can be timed here and now: threads that sleep are woken late. Nothing where they are not. Takes 50 ms.
[[nodiscard]] std::optional<std::string> too_busy_to_time();

/// The same for links, which are given times among threads of one process only.
[[nodiscard]] std::optional<std::string> cannot_time_links(const RunContext& context);

/// Time of a step in which a rank communicates, or waits to, and does not compute, by its timeline; mean over ranks, least over
/// measured steps: what else runs on the machine only adds to it.
[[nodiscard]] double exposed_seconds(const Measured& measured);

/// Whether the operation is the last of a pass over one layer (forward, backward for the input, backward for the weights): where
/// a layer that is to take a stated time spends it, asleep.
[[nodiscard]] bool ends_pass(const Operation& op);

/// One link for all ranks.
[[nodiscard]] LinkProfile stated_link(double latency_seconds, double bytes_per_second);

/// fp32 bytes of the gradients of one layer, so that a bucket can be given the size of a layer.
[[nodiscard]] std::int64_t layer_bytes(const GptConfig& model);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "harness/case.h"

namespace tandem {

/// Why nothing can be timed here and now: threads that sleep are woken late. Nothing where they are not. Takes 50 ms.
[[nodiscard]] std::optional<std::string> too_busy_to_time();

/// The same for links, which are given times among threads of one process only.
[[nodiscard]] std::optional<std::string> cannot_time_links(const RunContext& context);

/// Time of a step in which a rank communicates, or waits to, and does not compute, by its timeline; mean over ranks, least over
/// measured steps: what else runs on the machine only adds to it.
[[nodiscard]] double exposed_seconds(const Measured& measured);

}  // namespace tandem

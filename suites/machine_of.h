// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "harness/case.h"
#include "optimized/machine.h"

namespace tandem {

/// What the ranks of a case compute on.
[[nodiscard]] inline MachineChoice machine_of(const RunContext& context) {
  return {.backend = context.backend,
          .pitfalls = context.pitfalls,
          .device = device_of(context.world.transport),
          .own_parts = context.world.own_parts};
}

/// Case::unavailable of what says nothing about another backend than the CPU.
[[nodiscard]] inline std::optional<std::string> measures_the_cpu(const RunContext& context) {
  return context.backend == "cpu" ? std::nullopt : std::optional<std::string>("measures the CPU");
}

}  // namespace tandem

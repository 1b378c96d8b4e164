// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/step_program.h"

namespace tandem {

/// Operations [begin, end) of a program, between which nothing needs the host: a device may be given them as one graph
/// (Kernels::begin_graph). Segments of the same key compute the same with the same sizes; allocations belong to whatever is under
/// way.
struct GraphSegment {
  OperationId begin = 0, end = 0;
  std::uint64_t key = 0;
  friend bool operator==(const GraphSegment&, const GraphSegment&) = default;
};

/// The forward and the backward part of each micro-batch, as far as they run without communication and without waiting for one:
/// while a device executes the one, the host records the other. Runs of less than `least_computes` operations that compute are
/// left out, as is what computes nothing. Ascending.
[[nodiscard]] std::vector<GraphSegment> graph_segments(const StepProgram& program, int least_computes = 4);

}  // namespace tandem

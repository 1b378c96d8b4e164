// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "optimized/scaling/replay.h"

namespace tandem {

/// The step program of a rank of the world, for example [&](int rank) { return lower(plan, model, sequence, rank); }. Asked for
/// one rank at a time, so that no more than two programs are in memory.
using ProgramOfRank = std::function<StepProgram(int rank)>;

struct ChakraFiles {
  std::vector<std::filesystem::path> traces;  ///< [ranks] PREFIX.RANK.et
  std::filesystem::path groups;               ///< PREFIX.groups.json
  std::int64_t nodes = 0;                     ///< of all ranks
};

/// Writes the step program of every rank as a Chakra execution trace (MLCommons Chakra, et_def.proto; docs/formats.md has the
/// fields): length-delimited protobuf messages, GlobalMetadata and then a Node for each operation that communicates or that
/// `cost` gives time, in program order, with the dependencies that the engine's rules make: a rank's operations follow each
/// other, nothing waits for a send, operations in the background are waited for where they are named, those of one group follow
/// each other. ring_shift is a send and a receive. Process groups are numbered as ASTRA-sim expects, the group of all ranks
/// having none. Throws IoError; InputError where a group's ranks do not agree on how often they shift.
[[nodiscard]] ChakraFiles write_chakra(const ProgramOfRank& program_of, const TrainingPlan& plan, const OperationCost& cost,
                                       const std::filesystem::path& prefix);

}  // namespace tandem

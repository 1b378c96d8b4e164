// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "optimized/recovery/memory_tier.h"

/// Where the memory tier keeps what, and how a checkpoint is put together from what several nodes have.
namespace tandem {

/// FOLDER/node-K
[[nodiscard]] std::filesystem::path memory_node_folder(const MemoryTierPlace& place, int node);
/// Of a rank, or of a process of a job that has one for each rank.
[[nodiscard]] int memory_node_of(const MemoryTierPlace& place, int rank);
/// FOLDER/node-K/restored: what assemble_from_memory() makes.
[[nodiscard]] std::filesystem::path memory_restored_folder(const MemoryTierPlace& place, int node);

/// What every process says, in their order. Collective.
using ProcessExchange = std::function<std::vector<std::string>(const std::string& own)>;

/// assemble_from_memory() of process `process` of those that `exchange` joins.
[[nodiscard]] std::optional<std::filesystem::path> assemble_from_memory(const MemoryTierPlace& place, int process,
                                                                        const ProcessExchange& exchange,
                                                                        const std::function<void(const std::string&)>& note);

}  // namespace tandem

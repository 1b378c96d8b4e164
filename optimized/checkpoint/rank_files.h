// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "core/io/file_operations.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/checkpoint/snapshot.h"
#include "optimized/engine/engine.h"

namespace tandem {

/// `info` with what the engine knows: model, plan, schedule, updates, scales.
[[nodiscard]] CheckpointInfo with_engine_state(CheckpointInfo info, const Engine& engine);

/// Writes the shard of a rank, and its residuals where there are such, into the unfinished folder of the step; older files of
/// these names make way. bytes(i): of parts[i]. Throws IoError.
[[nodiscard]] std::vector<CheckpointFile> write_rank_files(FileOperations& files, const std::filesystem::path& folder,
                                                           const std::vector<CheckpointPart>& parts,
                                                           const std::function<std::span<const std::byte>(std::size_t)>& bytes,
                                                           const ResidualSnapshot& residuals, int rank, bool durable);

}  // namespace tandem

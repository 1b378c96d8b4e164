// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "optimized/scaling/replay.h"

namespace tandem {

/// What another simulator needs to play a step (docs/formats.md, "Step programs"): the links of the cluster, the groups, and the
/// programs of the pipeline stages, computing in seconds by the cost model and communication in bytes, so that whoever reads it
/// finds the time of that, and of the step, by itself. What replay() says of the same step stands beside it.
[[nodiscard]] std::string programs_as_text(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence,
                                           const ClusterSpec& cluster);
/// Throws IoError.
void export_programs(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, const ClusterSpec& cluster,
                     const std::filesystem::path& file);

}  // namespace tandem

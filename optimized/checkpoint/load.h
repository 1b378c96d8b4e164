// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

#include "core/pitfall.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/engine/engine.h"

namespace tandem {

/// What the manifest of a step folder says beside its tensors. Throws InputError naming file and field.
[[nodiscard]] CheckpointInfo read_checkpoint_info(const std::filesystem::path& step_folder, const PitfallSet& pitfalls = {});

/// Sets parameters, moments, update count, loss scale, fp8 scales and residuals of the engine, whose model must be the one that
/// was saved; layout, ZeRO stage and precision may be others. Reads the parts that this rank needs and no more, straight into
/// their places. No communication.
///
/// Throws InputError where a tensor is missing, has another shape or is none of the model's, or where `info` contradicts itself
/// (a learning rate that its schedule does not give); the engine is then of no use. Files are not hashed again: find_checkpoint()
/// has done that.
void load_checkpoint(const std::filesystem::path& step_folder, const CheckpointInfo& info, Engine& engine);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "core/config.h"
#include "core/pitfall.h"
#include "optimized/engine/engine.h"

namespace tandem {

/// What a checkpoint says beside its tensors.
struct CheckpointInfo {
  RunConfig config;
  std::int64_t next_step = 0;  ///< the first step that is not yet in the parameters
  std::string data;            ///< where the batches came from, as the command line named it
  // Of the engine; save_checkpoint() takes them from there:
  std::int64_t updates = 0;
  LossScalerState loss_scaler{};
  Fp8ScalingState fp8{};
};

/// A plain synchronous checkpoint of whole tensors: FOLDER/step-00000120/{model,optimizer}.safetensors and state.json. It is
/// written beside its name and renamed when complete; then FOLDER/latest names it. Throws IoError (disk full, permission): the
/// folder keeps what it had.
///
/// Collective: rank 0 puts the tensors together and writes. Returns the folder of the step, on other ranks nothing. Any layout
/// can load what any other has saved.
std::filesystem::path save_checkpoint(const std::filesystem::path& folder, const Engine& engine, const CheckpointInfo& info);

/// The step folder that `folder` means: itself, or the one that its `latest` names. Throws InputError where there is none.
[[nodiscard]] std::filesystem::path find_checkpoint(const std::filesystem::path& folder);

/// state.json of a step folder. Throws InputError naming file and field.
[[nodiscard]] CheckpointInfo read_checkpoint_info(const std::filesystem::path& step_folder);

/// Sets parameters, moments and update count of the engine, whose model must be the one that was saved. Throws InputError where a
/// tensor is missing or has another shape.
void load_checkpoint(const std::filesystem::path& step_folder, const CheckpointInfo& info, Engine& engine);

}  // namespace tandem

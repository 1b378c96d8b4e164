// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "core/io/file_operations.h"
#include "core/plan.h"

namespace tandem {

struct ReshardOptions {
  /// Gets one line for each thing that cannot be taken along: residuals of compression, which belong to ranks.
  std::function<void(const std::string&)> note = {};
  FileOperations* files = nullptr;  ///< borrowed; null: system_files()
};

/// Writes the checkpoint `from_step_folder` as a run with `new_plan` would have saved it: the same values, moments included, in
/// files of other ranks; configuration, schedule, scales and position as they were, but for the plan. Master copies of another
/// dtype are rounded. `to_folder` gets a step folder of the same step, published as training publishes (publish.h), so that it
/// may be the folder that the checkpoint is in: then it is replaced at once. Returns the step folder.
///
/// One file after the other, a few megabytes at a time. Throws InputError where the checkpoint is damaged (contents included) or
/// the plan is not legal for its model, IoError as FileOperations; `to_folder` then has what it had.
std::filesystem::path reshard_checkpoint(const std::filesystem::path& from_step_folder, const std::filesystem::path& to_folder,
                                         const TrainingPlan& new_plan, const ReshardOptions& options = {});

}  // namespace tandem

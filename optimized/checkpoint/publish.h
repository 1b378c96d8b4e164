// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/io/file_operations.h"
#include "core/pitfall.h"
#include "optimized/checkpoint/manifest.h"

namespace tandem {

/// FOLDER/step-N.unfinished: where the files of a step are written before it is published.
[[nodiscard]] std::filesystem::path unfinished_folder(const std::filesystem::path& folder, std::int64_t step);
/// Makes it, and the folders above, where they do not exist. Any number of ranks may call this.
std::filesystem::path make_unfinished_folder(FileOperations& files, const std::filesystem::path& folder, std::int64_t step);

/// "shard-00003.safetensors", "residuals-00003.safetensors".
[[nodiscard]] std::string shard_name(int rank);
[[nodiscard]] std::string residuals_name(int rank);

/// The index of all tensors from what the ranks have written, as checkpoint_parts() deals them; info.config says the layout.
[[nodiscard]] CheckpointManifest make_manifest(const CheckpointInfo& info,
                                               const std::vector<std::vector<CheckpointFile>>& files_by_rank,
                                               const PitfallSet& pitfalls = {});

/// Whether a checkpoint of that step is being written in `folder`, or is complete; one that gets its name meanwhile is not
/// missed. `exists`: a look at a name; empty: at the file system.
[[nodiscard]] bool is_written_or_being_written(const std::filesystem::path& folder, std::int64_t step,
                                               const std::function<bool(const std::filesystem::path&)>& exists = {});

struct PublishOptions {
  std::filesystem::path folder;
  std::int64_t keep = 0;                ///< newest checkpoints that stay; 0: all
  std::set<std::int64_t> protect = {};  ///< steps that stay all the same
  PitfallSet pitfalls{};
  std::optional<std::int64_t> step =
      {};  ///< in whose unfinished folder the files are; the manifest's next_step where it is empty
};

/// The last steps of a checkpoint whose files are complete and durable in its unfinished folder: checks that they are there and
/// removes what a run that ended may have left among them; writes the manifest; gives the folder its name, where an older one of
/// the same step makes way in the same moment; moves `latest`; removes old checkpoints. Each is durable before the next begins.
/// Returns the step folder. Throws IoError where files are missing or the system refuses: `folder` then has what it had. What is
/// refused once the folder has its name costs no checkpoint: `note` gets a line that says so, and nothing is thrown.
std::filesystem::path publish_checkpoint(FileOperations& files, const CheckpointManifest& manifest, const PublishOptions& options,
                                         const std::function<void(const std::string&)>& note = {});

}  // namespace tandem

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

/// "step-00000120" and back; nothing for another name.
[[nodiscard]] std::string step_folder_name(std::int64_t step);
[[nodiscard]] std::optional<std::int64_t> parse_step_folder_name(const std::string& name);

/// A folder with the name of a step's checkpoint, whole or not.
struct CheckpointEntry {
  std::int64_t step = 0;
  std::filesystem::path folder;
};

/// The step folders in `folder`, newest first, whole or not. Throws InputError where `folder` is none.
[[nodiscard]] std::vector<CheckpointEntry> list_checkpoints(const std::filesystem::path& folder);

/// manifest: it can be read and the files have their sizes; contents: and every hash, and every tensor of the index is in its
/// file with the dtype and shape that the index says, and no file is there that the manifest does not know.
enum class VerifyDepth : std::uint8_t { manifest, contents };

/// Why the step folder is no whole checkpoint, naming file and place; nothing where it is one.
[[nodiscard]] std::optional<std::string> find_damage(const std::filesystem::path& step_folder, VerifyDepth depth,
                                                     const PitfallSet& pitfalls = {});

/// The checkpoint that `folder` means: itself where it is a step folder, else the newest of its step folders that verifies,
/// contents included, whatever `latest` says. `note` gets one line for each newer one that was passed over, and why. Throws
/// InputError where there is none, with what was found (and no notes), or where a step folder that is named itself is damaged.
[[nodiscard]] std::filesystem::path find_checkpoint(const std::filesystem::path& folder,
                                                    const std::function<void(const std::string&)>& note = {},
                                                    const PitfallSet& pitfalls = {});

/// Removes all but the newest `keep` step folders that are whole (by manifest); 0 keeps all. What is not whole goes too where it
/// is older than a whole one that stays; folders of format 1 are left alone. The newest whole one always stays. The steps in
/// `protect` stay as well. Throws IoError as FileOperations.
void prune_checkpoints(const std::filesystem::path& folder, std::int64_t keep, FileOperations& files,
                       const std::set<std::int64_t>& protect = {});

}  // namespace tandem

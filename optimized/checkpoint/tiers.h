// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "optimized/checkpoint/manifest.h"
#include "optimized/storage/object_store.h"

namespace tandem {

/// A checkpoint's second home: objects STEP_FOLDER/FILE, and `latest`. Files may be uploaded in any order and by several ranks;
/// publish_remote() writes the manifest last, so that a step without one is no checkpoint, and then `latest`.
void upload_checkpoint_file(ObjectStore& store, const std::filesystem::path& step_folder, const std::string& file);

/// Checks that every file of the manifest is there with its size, then publishes. Throws StoreError where one is missing; where
/// the step exists already with the same content, nothing is done, with another one it is replaced.
void publish_remote(ObjectStore& store, const std::filesystem::path& step_folder);

/// All files of a complete step folder, then publish_remote(). Throws StoreError.
void upload_checkpoint(ObjectStore& store, const std::filesystem::path& step_folder);

/// Steps that have a manifest, newest first.
[[nodiscard]] std::vector<std::int64_t> list_remote_checkpoints(const ObjectStore& store);

/// Copies a step into `folder`, verifies it there (contents), and only then gives it its name. A whole copy that is there already
/// stays. Returns the step folder. Throws InputError where the copy does not verify, StoreError where the store fails.
std::filesystem::path fetch_checkpoint(const ObjectStore& store, std::int64_t step, const std::filesystem::path& folder);

/// Removes all but the newest `keep` published steps, manifests first; 0 keeps all. The steps in `protect` stay as well.
void prune_remote(ObjectStore& store, std::int64_t keep, const std::set<std::int64_t>& protect = {});

/// Removes the published steps beyond `step`, manifests first.
void remove_remote_after(ObjectStore& store, std::int64_t step);

/// The newest checkpoint that verifies, over all tiers: of `folder` (which need not exist) and of the store; of equal steps the
/// local one. One that is only in the store is fetched into `folder`. A store that cannot be reached is a note, not an error,
/// where `folder` has one. `note` gets one line for each newer copy that was passed over. Throws InputError where no tier has
/// one.
[[nodiscard]] std::filesystem::path find_newest_checkpoint(const std::filesystem::path& folder, const ObjectStore* store,
                                                           const std::function<void(const std::string&)>& note = {});

}  // namespace tandem

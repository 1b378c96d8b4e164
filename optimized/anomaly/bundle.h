// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/config.h"
#include "core/io/file_operations.h"
#include "core/io/hash.h"
#include "optimized/anomaly/guard.h"

namespace tandem {

/// Everything that computes an incident again: FOLDER/incident-NNN/bundle.json, and beside it the checkpoint that it starts from
/// (hard links to its files where the file system has them: it outlives retention and costs nothing).
struct IncidentBundle {
  RunConfig config;  ///< plan, model, seed
  std::string data, data_identity;
  std::int64_t start_step = 0;                ///< steps done in the checkpoint; 0 and no checkpoint: the beginning
  std::string checkpoint;                     ///< folder beside bundle.json; empty: none
  std::vector<std::int64_t> skipped_batches;  ///< that the steps in between did not take
  std::int64_t step = 0;                      ///< of the incident, from 0
  std::int64_t batch = 0;
  std::vector<double> losses;          ///< of the steps from start_step to `step`, as seen
  std::vector<double> gradient_norms;  ///< likewise; what was not finite is kept as it was
  std::vector<std::string> findings;   ///< AnomalyFinding::describe()
  Hash128 batch_hash;                  ///< of its ids and targets
};

/// Of its ids and targets.
[[nodiscard]] Hash128 hash_of(const Batch& batch);
/// Bundles of a run that stay, the newest by number: each holds the files of a checkpoint.
inline constexpr std::size_t kKeptBundles = 20;
/// Returns the folder. Bundles beyond kKeptBundles are removed, the oldest first; what cannot be is left. Throws IoError.
std::filesystem::path write_bundle(const std::filesystem::path& run_folder, std::int64_t number, const IncidentBundle& bundle,
                                   FileOperations& files);
/// Throws InputError naming file and field.
[[nodiscard]] IncidentBundle read_bundle(const std::filesystem::path& bundle_folder);

}  // namespace tandem

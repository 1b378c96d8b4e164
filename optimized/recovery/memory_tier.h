// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/pitfall.h"
#include "core/world_settings.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/engine/engine.h"

namespace tandem {

/// Where the memory tier of a run lives on a node: memory that outlives processes (a tmpfs such as /dev/shm).
struct MemoryTierPlace {
  std::filesystem::path folder;  ///< of the run: shared by its attempts, and by nothing else
  int ranks_per_node = 0;        ///< 0: all ranks on one node. Else node k has ranks k ranks_per_node and following
};

/// Copies of the state in memory, taken every few steps: what a restart of the processes needs without reading a disk, and, with
/// several nodes, what it needs when a node is gone: each rank's files are also kept by its neighbour, rank
/// (rank + ranks_per_node) mod ranks (where the last node has fewer ranks: by one of the next node).
///
///   FOLDER/node-K/step-N/shard-R.safetensors ...   as a checkpoint's folder, with the files of node K's ranks, and of those
///                        manifest.json             that it keeps copies of; the manifest is that of all ranks
///
/// A step appears in all nodes whole or not at all, and the newest one stays until the next one is there in all of them: a save
/// writes over the one before the newest, whose pages are touched already, and gives the folder its name when it is complete on
/// every rank. Memory: two copies of what a rank stores, and two of a neighbour's. Nothing is made durable. Failures (no memory
/// left) never throw: they are in problem(), the same on all ranks, and training goes on.
class MemoryTier {
 public:
  /// The engine is borrowed. Collective.
  MemoryTier(MemoryTierPlace place, Engine& engine, const PitfallSet& pitfalls = {});
  ~MemoryTier();
  MemoryTier(const MemoryTier&) = delete;
  MemoryTier& operator=(const MemoryTier&) = delete;

  /// Collective: copies the state as it is. Returns when the copy is there.
  void save(const CheckpointInfo& info);
  /// Collective: copies of later steps are removed (after a rollback).
  void forget_after(std::int64_t step);
  [[nodiscard]] std::optional<std::int64_t> newest() const noexcept;
  [[nodiscard]] const std::string& problem() const noexcept;  ///< the last; empty: none
  [[nodiscard]] double save_seconds() const noexcept;         ///< of the last save on this rank
  [[nodiscard]] std::int64_t copied_bytes() const noexcept;   ///< sent to the neighbour so far

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// Newest step whose shards are all in the memory of some node that can be read from here, and whole. Only looks.
[[nodiscard]] std::optional<std::int64_t> newest_in_memory(const MemoryTierPlace& place);

/// Makes a whole checkpoint folder (to be read by load_checkpoint(), verified) of the newest step that is whole over all nodes,
/// in this node's memory: what another node has is asked of it. Where one folder has everything, it is that one; else
/// FOLDER/node-K/restored/step-N, which the next save removes. Collective over the processes of the job, on whose nodes (by
/// their number in the job) the first makes the folder. Nothing where there is none; `note` gets a line for what was passed over.
[[nodiscard]] std::optional<std::filesystem::path> assemble_from_memory(const MemoryTierPlace& place, const WorldSettings& world,
                                                                        const std::function<void(const std::string&)>& note = {},
                                                                        const PitfallSet& pitfalls = {});

/// Removes what a run has left in memory.
void clear_memory_tier(const MemoryTierPlace& place);

}  // namespace tandem

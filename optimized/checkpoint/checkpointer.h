// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/io/file_operations.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/engine/engine.h"
#include "optimized/storage/object_store.h"

namespace tandem {

struct CheckpointerOptions {
  std::filesystem::path folder;
  bool asynchronous = true;                 ///< false: save() returns when the checkpoint is durable, in the store too
  std::int64_t keep = 0;                    ///< newest checkpoints that stay, on each tier; 0: all
  std::shared_ptr<ObjectStore> store = {};  ///< second tier; null: none
  FileOperations* files = nullptr;          ///< borrowed; null: system_files()
};

/// Times of one checkpoint.
struct CheckpointTimes {
  std::int64_t step = 0;
  std::int64_t bytes = 0;        ///< that this rank copied
  std::int64_t total_bytes = 0;  ///< of the files of all ranks
  double blocking_seconds = 0;   ///< in save() on this rank: waiting for the one before, and the snapshot
  double waiting_seconds = 0;    ///< of these, for the one before
  double writing_seconds = 0;    ///< files and their syncs in the background, of the slowest rank
  double uploading_seconds = 0;  ///< to the store, of the slowest rank
  bool published = false;        ///< in the folder
  bool ended = false;            ///< nothing more is done about it: it is on every tier, or was given up
};

/// Writes checkpoints of one rank's engine while training goes on (docs/techniques/checkpoint.md):
///
///   snapshot  save() copies what this rank contributes into host memory: the only part that blocks. Replicas share the work: of
///             each tensor that n ranks hold, every one stores 1/n.
///   write     a thread of the rank writes its file shard-RANK.safetensors into step-N.unfinished, hashing as it goes, and syncs
///   it publish   when poll() sees that all ranks are through, rank 0 writes the manifest, renames the folder, syncs, and moves
///   `latest` upload    each rank's files, then the manifest, to the store; what fails there leaves the local checkpoint as it is
///
/// Memory: one snapshot. A save() that finds the one before still being written waits for it, and says so in its times.
/// A snapshot owns its bytes: what the writer reads is never what the next step writes.
class Checkpointer {
 public:
  /// The engine is borrowed.
  Checkpointer(CheckpointerOptions options, Engine& engine);
  /// Abandons what has not been published.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Collective: begins a checkpoint of the engine as it is. Failures of files and store never throw: they are in problems(), and
  /// training goes on.
  void save(const CheckpointInfo& info);
  /// Collective, after each step: publishes what is complete on all ranks. Does not wait.
  void poll();
  /// Collective: waits until nothing is under way. Where the newest checkpoint could not be uploaded, that is tried once more.
  void finish();
  /// Steps that retention leaves alone, on each tier, from the next checkpoint on.
  void protect(std::set<std::int64_t> steps);

  /// The newest that this object has published; empty before. On every rank.
  [[nodiscard]] const std::filesystem::path& newest() const noexcept;
  /// The last that was begun is published on every tier; true before the first. On every rank.
  [[nodiscard]] bool last_is_safe() const noexcept;
  /// One line for each checkpoint that could not be written, or not be uploaded, or whose `latest` or predecessors could not be
  /// changed; the same on all ranks.
  [[nodiscard]] const std::vector<std::string>& problems() const noexcept;
  [[nodiscard]] const std::vector<CheckpointTimes>& times() const noexcept;
  [[nodiscard]] bool busy() const noexcept;

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// A checkpoint at once: Checkpointer with asynchronous = false. Collective; returns the step folder on every rank. Throws
/// IoError on every rank where it could not be written; `folder` keeps what it had.
std::filesystem::path save_checkpoint(const std::filesystem::path& folder, Engine& engine, const CheckpointInfo& info);

}  // namespace tandem

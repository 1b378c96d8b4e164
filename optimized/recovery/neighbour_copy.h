// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/io/file_operations.h"
#include "core/pitfall.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/comm/communicator.h"

namespace tandem {

/// Files in memory (a tmpfs). They are written over those that are there, whose pages need not be touched for the first time
/// again, which costs more than the copy; and nothing outlives the machine, so that nothing is made durable. remove() takes
/// folders away, not files: those are about to be written again.
class PageKeepingFiles final : public WrappedFiles {
 public:
  [[nodiscard]] int create(const std::filesystem::path& file) override;
  void sync(int descriptor, const std::filesystem::path& file) override;
  /// Cuts the file behind what was written.
  void close(int descriptor, const std::filesystem::path& file) override;
  void sync_folder(const std::filesystem::path& folder) override;
  void remove(const std::filesystem::path& path) override;
};

/// The rank of the next node that keeps copies of `rank`'s files: (rank + ranks_per_node) mod ranks, where nodes are equal.
[[nodiscard]] int keeper_of(int rank, int ranks, int ranks_per_node);

struct NeighbourCopy {
  std::int64_t sent_bytes = 0;
  std::string error;  ///< empty: all that this rank keeps for others is here
};

/// Collective: sends this rank's files, which are in `folder`, to its keeper, and writes what others send for keeping into
/// `folder`, checked against their hashes. A rank that cannot write says so in `error` and goes on receiving. Throws what the
/// communicator does.
[[nodiscard]] NeighbourCopy copy_to_neighbours(Communicator& world, FileOperations& files, const std::filesystem::path& folder,
                                               const std::vector<std::vector<CheckpointFile>>& files_by_rank, int ranks_per_node,
                                               std::int64_t step, const PitfallSet& pitfalls = {});

}  // namespace tandem

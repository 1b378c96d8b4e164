// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace tandem {

struct DiskCacheCounts {
  std::int64_t hits = 0;
  std::int64_t misses = 0;
  std::int64_t hit_bytes = 0;
  std::int64_t evictions = 0;
  std::int64_t damaged = 0;  ///< found, and removed, because their bytes were not those that were put there
  std::int64_t refused = 0;  ///< not kept, because the system refused to write them
  std::int64_t held_bytes = 0;
};

/// Byte strings in files of a folder, FOLDER/NAME.block, which stay when the process ends. Those that were not used for longest
/// are removed so that all together take no more than the capacity; several processes may share a folder, and each keeps to it
/// by what it has seen. Safe to use from several threads.
///
/// Nothing is made durable: every file carries a hash of its bytes, and one that does not fit is as none.
class DiskCache {
 public:
  /// Makes the folder and finds what is there. Throws IoError where the folder cannot be made or written to.
  DiskCache(std::filesystem::path folder, std::int64_t capacity_bytes);

  /// `name`: parts of letters, digits and '-', separated by '/'.
  [[nodiscard]] std::optional<std::vector<std::byte>> get(const std::string& name);
  /// Keeps the bytes where they fit into the capacity and the system lets them be written; never throws for that.
  void put(const std::string& name, std::span<const std::byte> bytes);

  [[nodiscard]] DiskCacheCounts counts() const;
  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }

 private:
  struct Entry {
    std::int64_t bytes = 0;  ///< of the file
    std::list<std::string>::iterator place;
  };
  void find_files();
  [[nodiscard]] std::filesystem::path path_of(const std::string& name) const;
  // The mutex is held.
  void insert(const std::string& name, std::int64_t bytes);
  void erase(const std::string& name);
  void make_room(std::int64_t bytes);

  std::filesystem::path folder_;
  std::int64_t capacity_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Entry> entries_;
  std::list<std::string> order_;  ///< the one used last in front
  std::int64_t written_ = 0;
  DiskCacheCounts counts_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "suites/checkpoint_files.h"

namespace tandem {

/// Everything that a run asked of the file system below one folder, in the order in which it was done.
class FileLog {
 public:
  explicit FileLog(std::filesystem::path root) : root_(std::move(root)) {}

  struct Event {
    FileAction action = FileAction::create;
    std::string path, other;  ///< relative to the root
    std::vector<std::byte> bytes = {};
    std::int64_t promised = -1;  ///< the newest checkpoint that had been reported as published before this event
  };

  [[nodiscard]] HookedFiles::Hook recorder() {
    return [this](const FileCall& call) { record(call); };
  }
  /// From now on the checkpoint of `step` is reported as published: no crash may lose it or what came after.
  void promise(std::int64_t step);
  [[nodiscard]] const std::vector<Event>& events() const noexcept { return events_; }
  [[nodiscard]] std::int64_t promised() const noexcept { return promised_; }

 private:
  void record(const FileCall& call);

  std::filesystem::path root_;
  std::mutex mutex_;
  std::vector<Event> events_;
  std::int64_t promised_ = -1;
};

/// What a crash leaves of file contents: everything (only the program died), what was synced alone, or that and half of the rest.
enum class LostData : std::uint8_t { none, unsynced, half_of_unsynced };
/// What it leaves of names: all, or those that a folder had when it was last synced.
enum class LostNames : std::uint8_t { none, unsynced };

/// How forgetful the file system was.
struct CrashVariant {
  LostData data = LostData::none;
  LostNames names = LostNames::none;
};
/// Every combination.
[[nodiscard]] std::vector<CrashVariant> crash_variants();
[[nodiscard]] std::string describe(const CrashVariant& variant);

/// Files and folders after a crash; names are relative paths, folders end in '/'.
using CrashedTree = std::map<std::string, std::string>;

/// A model of a file system that forgets: names in folders and bytes in files are durable once they are synced, and not before.
class CrashModel {
 public:
  CrashModel();
  ~CrashModel();
  void apply(const FileLog::Event& event);
  [[nodiscard]] CrashedTree after_crash(const CrashVariant& variant) const;

 private:
  struct Node;
  [[nodiscard]] Node& parent_of(const std::string& path) const;
  std::shared_ptr<Node> root_;
};

void write_tree(const CrashedTree& tree, const std::filesystem::path& folder);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

#include "core/io/file_operations.h"

namespace tandem {

enum class FileAction : std::uint8_t { create, write, sync, close, rename, exchange, sync_folder, make_folder, remove };

/// One request to the file system; `bytes` are lent for the call.
struct FileCall {
  FileAction action = FileAction::create;
  std::filesystem::path path;
  std::filesystem::path other = {};  ///< rename, exchange
  std::span<const std::byte> bytes = {};
};

/// The operating system's, with something looking on: `before` may wait or throw IoError, then nothing is done; `after` sees what
/// succeeded. Both are called from the threads that write, several at a time.
class HookedFiles final : public FileOperations {
 public:
  using Hook = std::function<void(const FileCall&)>;
  explicit HookedFiles(Hook before, Hook after = {}) : before_(std::move(before)), after_(std::move(after)) {}

  [[nodiscard]] int create(const std::filesystem::path& file) override;
  void write(int descriptor, const std::filesystem::path& file, std::span<const std::byte> bytes) override;
  void sync(int descriptor, const std::filesystem::path& file) override;
  void close(int descriptor, const std::filesystem::path& file) override;
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override;
  [[nodiscard]] bool exchange(const std::filesystem::path& one, const std::filesystem::path& other) override;
  void sync_folder(const std::filesystem::path& folder) override;
  void make_folder(const std::filesystem::path& folder) override;
  void remove(const std::filesystem::path& path) override;

 private:
  Hook before_, after_;
};

/// Holds writers up: whoever passes while it is shut waits until it is opened. A writer that nobody lets through gives up after
/// five seconds, once for all, and that is remembered: someone waits for it who must not.
class Gate {
 public:
  void shut();
  void open();
  void pass();
  [[nodiscard]] bool given_up() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool shut_ = false;
  bool given_up_ = false;
};

}  // namespace tandem

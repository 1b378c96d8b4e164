// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace tandem {

/// What a writer asks of the file system, one call for each request, so that a test can record the requests, refuse one, or end
/// the program between two. Safe to call from several threads for different files.
///
/// Every member throws IoError with path and the system's reason where it is refused.
class FileOperations {
 public:
  FileOperations() = default;
  FileOperations(const FileOperations&) = delete;
  FileOperations& operator=(const FileOperations&) = delete;
  virtual ~FileOperations() = default;

  /// A new file, which must not exist; returns its descriptor, open for writing.
  [[nodiscard]] virtual int create(const std::filesystem::path& file) = 0;
  /// All of `bytes`, behind what has been written. `file` is for messages.
  virtual void write(int descriptor, const std::filesystem::path& file, std::span<const std::byte> bytes) = 0;
  /// Makes what has been written durable.
  virtual void sync(int descriptor, const std::filesystem::path& file) = 0;
  virtual void close(int descriptor, const std::filesystem::path& file) = 0;
  /// Atomic; replaces a file `to`, and an empty folder.
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  /// Swaps two names atomically. False, and nothing done, where the file system cannot.
  [[nodiscard]] virtual bool exchange(const std::filesystem::path& one, const std::filesystem::path& other) = 0;
  /// Makes the names in `folder` durable. File systems that cannot sync a folder are passed over in silence.
  virtual void sync_folder(const std::filesystem::path& folder) = 0;
  /// One folder, whose parent exists. One that exists is left alone.
  virtual void make_folder(const std::filesystem::path& folder) = 0;
  /// A file, or a folder with all it holds; what does not exist is passed over.
  virtual void remove(const std::filesystem::path& path) = 0;
};

/// Those of the operating system.
[[nodiscard]] FileOperations& system_files();

/// `text` as the file `path`: written beside it, made durable, renamed over it, the name made durable.
void replace_file(FileOperations& files, const std::filesystem::path& path, std::span<const std::byte> text);

}  // namespace tandem

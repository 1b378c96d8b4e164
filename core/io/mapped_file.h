// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace tandem {

/// A regular file mapped read-only for as long as this object lives; move-only. Pages are read when touched, so that a file
/// larger than memory can be opened. A file that shrinks while it is mapped ends the process (SIGBUS): tandem's own files are
/// replaced by rename, never cut, and a mapping keeps the old bytes.
///
/// Throws InputError where the path does not exist, is a directory or another thing that cannot be mapped, or may not be read.
class MappedFile {
 public:
  explicit MappedFile(std::filesystem::path path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  /// The whole file; empty for an empty one. The first byte is page-aligned.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  void unmap() noexcept;

  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

}  // namespace tandem

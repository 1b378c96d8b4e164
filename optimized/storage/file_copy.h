// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "core/io/file_operations.h"

namespace tandem {

/// A file that is read in pieces by position.
class FileReader {
 public:
  /// Throws InputError where it cannot be opened.
  explicit FileReader(std::filesystem::path file);
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  ~FileReader();

  [[nodiscard]] std::int64_t size_bytes() const noexcept { return size_bytes_; }
  /// All of `bytes`, from `offset` on. Throws IoError, also where the file ends before.
  void read(std::int64_t offset, std::span<std::byte> bytes) const;

 private:
  std::filesystem::path file_;
  int descriptor_ = -1;
  std::int64_t size_bytes_ = 0;
};

/// A new file with the bytes of another one, as write_new_file(); memory is bounded.
void copy_to_new_file(FileOperations& files, const std::filesystem::path& from, const std::filesystem::path& to);

/// Removes a file at the end of its scope, unless told to keep it. One that exists when this is made is not removed: the file
/// must be new, and making it will fail.
class RemovedOnError {
 public:
  explicit RemovedOnError(std::filesystem::path file);
  RemovedOnError(const RemovedOnError&) = delete;
  RemovedOnError& operator=(const RemovedOnError&) = delete;
  ~RemovedOnError();
  void keep() const noexcept { armed_ = false; }

 private:
  std::filesystem::path file_;
  mutable bool armed_;
};

}  // namespace tandem

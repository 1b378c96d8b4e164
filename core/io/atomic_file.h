// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// A file that appears under its name whole or not at all: bytes go to a temporary file in the same folder, which commit() makes
/// durable (fsync), renames over the target, and makes the rename durable (fsync of the folder). Destroyed without commit(), it
/// removes the temporary file and leaves an older target as it was. Where the file system can (O_TMPFILE), that file has no name
/// before finish(): a process that is killed leaves nothing behind.
///
/// A target that exists and is no regular file (/dev/null, a pipe) is written in place: renaming would replace the device. A
/// symbolic link is followed, so that the link stays one. An overwritten file keeps its permissions.
///
/// Every member throws IoError (path, bytes written so far, the system's reason) where the system refuses: folder missing, no
/// permission, disk full, quota. After an error the object can only be destroyed.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  /// Appends; buffered, so that an error may surface at a later call.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  /// Writes what is buffered and makes it durable without showing it yet. Of several files that belong together, finish() all
  /// before the first commit(): a full disk is then found while nothing has changed.
  void finish();
  /// finish(), then the rename. Nothing may be written afterwards.
  void commit();

  /// Bytes handed to write() so far.
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return size_bytes_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  void flush();
  void write_again_with_name();
  void close_and_remove() noexcept;
  [[noreturn]] void fail(std::string_view action, int error_number);

  std::filesystem::path path_;       ///< as the caller named it, for messages
  std::filesystem::path target_;     ///< symbolic links resolved
  std::filesystem::path temporary_;  ///< empty when the target is written in place
  std::vector<std::byte> buffer_;
  std::int64_t size_bytes_ = 0;
  int descriptor_ = -1;
  bool finished_ = false;
};

/// The whole of `text` as the file `path`, by AtomicFile.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

/// The whole file. Throws InputError where it does not exist, is a directory or may not be read, IoError where reading fails.
[[nodiscard]] std::string read_text_file(const std::filesystem::path& path);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>

namespace tandem {

/// Owns an open file; closes it at the end of its scope, without looking whether that went well.
class FileDescriptor {
 public:
  /// As open(2), with O_CLOEXEC; a new file may be read and written by all that the umask allows. errno is set where it fails.
  FileDescriptor(const std::filesystem::path& file, int flags) : value_(::open(file.c_str(), flags | O_CLOEXEC, 0666)) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (value_ >= 0) ::close(value_);
  }
  /// Below 0 where it could not be opened.
  [[nodiscard]] int value() const noexcept { return value_; }

 private:
  int value_;
};

}  // namespace tandem

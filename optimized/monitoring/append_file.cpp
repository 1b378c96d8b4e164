// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/file_operations.h"

namespace tandem {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, std::string_view action, int reason) {
  throw IoError(fmt::format("{}: cannot {}: {}", path.string(), action, std::strerror(reason)));
}

// Bytes up to and with the last line break.
std::int64_t whole_lines_bytes(int descriptor, const std::filesystem::path& path, std::int64_t size_bytes) {
  std::array<char, 4096> block{};
  std::int64_t end = size_bytes;
  while (end > 0) {
    const std::int64_t begin = std::max<std::int64_t>(0, end - static_cast<std::int64_t>(block.size()));
    const ssize_t got = ::pread(descriptor, block.data(), static_cast<std::size_t>(end - begin), begin);
    if (got != end - begin) refuse(path, "read its end", got < 0 ? errno : EIO);
    const std::size_t at = std::string_view(block.data(), static_cast<std::size_t>(got)).rfind('\n');
    if (at != std::string_view::npos) return begin + static_cast<std::int64_t>(at) + 1;
    end = begin;
  }
  return 0;
}

}  // namespace

AppendFile::AppendFile(std::filesystem::path file, Existing existing) : path_(std::move(file)) {
  if (path_.has_parent_path()) make_folders(system_files(), path_.parent_path());
  const int flags = O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | (existing == Existing::refused ? O_EXCL : 0);
  descriptor_ = ::open(path_.c_str(), flags, 0666);
  if (descriptor_ < 0) refuse(path_, "open it for writing", errno);
  try {
    const off_t size_bytes = ::lseek(descriptor_, 0, SEEK_END);
    // A pipe or a device has no size: /dev/stdout and the like are written to as they are.
    if (size_bytes < 0) return;
    size_bytes_ = whole_lines_bytes(descriptor_, path_, size_bytes);
    if (size_bytes_ != size_bytes && ::ftruncate(descriptor_, size_bytes_) != 0) refuse(path_, "cut off its last line", errno);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

AppendFile::~AppendFile() { ::close(descriptor_); }

void AppendFile::append(std::string_view record) {
  std::size_t written = 0;
  while (written < record.size()) {
    const ssize_t count = ::write(descriptor_, record.data() + written, record.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int reason = count < 0 ? errno : ENOSPC;
      // Where even this is refused, the next opening cuts the part off.
      if (written > 0 && ::ftruncate(descriptor_, size_bytes_) != 0) refuse(path_, "write to it and take a part back", reason);
      refuse(path_, "write to it", reason);
    }
    written += static_cast<std::size_t>(count);
  }
  size_bytes_ += static_cast<std::int64_t>(record.size());
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/file_copy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kCopyBytes = std::int64_t{4} << 20;

}  // namespace

FileReader::FileReader(fs::path file) : file_(std::move(file)), descriptor_(::open(file_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (descriptor_ < 0) {
    throw InputError(fmt::format("cannot open {}: {}", file_.string(), std::generic_category().message(errno)));
  }
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    throw InputError(fmt::format("{} is no regular file", file_.string()));
  }
  size_bytes_ = status.st_size;
}

FileReader::~FileReader() { ::close(descriptor_); }

void FileReader::read(std::int64_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t count = ::pread(descriptor_, bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw IoError(fmt::format("cannot read {}: {}", file_.string(), std::generic_category().message(errno)));
    if (count == 0) throw IoError(fmt::format("{} ends at byte {}, {} more were expected", file_.string(), offset, bytes.size()));
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += count;
  }
}

void copy_to_new_file(FileOperations& files, const fs::path& from, const fs::path& to) {
  const FileReader reader(from);
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min(kCopyBytes, reader.size_bytes())));
  write_new_file(files, to, [&](const ByteWriter& write) {
    for (std::int64_t offset = 0; offset < reader.size_bytes();) {
      const std::int64_t count = std::min(kCopyBytes, reader.size_bytes() - offset);
      const std::span<std::byte> part = std::span(buffer).first(static_cast<std::size_t>(count));
      reader.read(offset, part);
      write(part);
      offset += count;
    }
  });
}

RemovedOnError::RemovedOnError(fs::path file) : file_(std::move(file)) {
  std::error_code ignored;
  armed_ = !fs::exists(fs::symlink_status(file_, ignored));
}

RemovedOnError::~RemovedOnError() {
  std::error_code ignored;
  if (armed_) fs::remove(file_, ignored);
}

}  // namespace tandem

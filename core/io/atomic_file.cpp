// SPDX-License-Identifier: Apache-2.0
#include "core/io/atomic_file.h"

#include <fcntl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <system_error>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;
constexpr int kTemporaryNames = 1000;

std::filesystem::path resolve_links(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return path;
  std::filesystem::path target = std::filesystem::canonical(path, error);
  return error ? path : target;
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

// Stands for a file that has no name yet; nobody makes one of this name.
constexpr const char* kUnnamed = ".tandem-unnamed";

std::filesystem::path temporary_name(const std::filesystem::path& folder, int attempt) {
  return folder / fmt::format(".tandem-{}-{}.tmp", ::getpid(), attempt);
}

std::pair<int, std::filesystem::path> open_named(const std::filesystem::path& folder, mode_t mode) {
  for (int attempt = 0; attempt < kTemporaryNames; ++attempt) {
    std::filesystem::path name = temporary_name(folder, attempt);
    const int descriptor = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (descriptor >= 0 || errno != EEXIST) return {descriptor, std::move(name)};
  }
  errno = EEXIST;
  return {-1, {}};
}

// Without a name where the file system can. Else names are tried in turn with O_EXCL: several threads of one process may write to
// one folder, and a crashed run with the same process number may have left some.
std::pair<int, std::filesystem::path> open_temporary(const std::filesystem::path& folder, mode_t mode) {
  const int unnamed = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, mode);
  // ENOENT too: of a kernel that does not know it, and then the next call says so again.
  if (unnamed >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL && errno != ENOENT)) {
    const int reason = errno;
    std::filesystem::path placeholder = folder / kUnnamed;
    errno = reason;
    return {unnamed, std::move(placeholder)};
  }
  return open_named(folder, mode);
}

// Gives the file a name beside its target; empty, with errno, where that cannot be: no /proc, or a file system that makes files
// without a name and does not let them be named.
std::filesystem::path name_temporary(int descriptor, const std::filesystem::path& folder) {
  const std::string link = fmt::format("/proc/self/fd/{}", descriptor);
  for (int attempt = 0; attempt < kTemporaryNames; ++attempt) {
    std::filesystem::path name = temporary_name(folder, attempt);
    if (::linkat(AT_FDCWD, link.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) return name;
    if (errno != EEXIST) return {};
  }
  errno = EEXIST;
  return {};
}

// All bytes of one file, into an empty one. False, with errno, where that fails.
bool copy_contents(int from, int to) {
  off_t offset = 0;
  while (true) {
    const ssize_t copied = ::sendfile(to, from, &offset, kBufferBytes);
    if (copied < 0 && errno == EINTR) continue;
    if (copied <= 0) return copied == 0;
  }
}

void sync_folder(const std::filesystem::path& folder) noexcept {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  // Some network file systems refuse to sync a folder; the file itself is complete and in place by now.
  (void)::fsync(descriptor);
  ::close(descriptor);
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), target_(resolve_links(path_)) {
  struct stat status {};
  const bool exists = ::stat(target_.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) fail("cannot write", EISDIR);
  if (exists && !S_ISREG(status.st_mode)) {
    descriptor_ = ::open(target_.c_str(), O_WRONLY | O_CLOEXEC);
  } else {
    std::tie(descriptor_, temporary_) = open_temporary(folder_of(target_), 0666);
    if (descriptor_ < 0) temporary_.clear();
    if (descriptor_ >= 0 && exists) (void)::fchmod(descriptor_, status.st_mode & 07777);
  }
  if (descriptor_ < 0) fail("cannot create", errno);
  buffer_.reserve(kBufferBytes);
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      buffer_(std::move(other.buffer_)),
      size_bytes_(other.size_bytes_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      finished_(other.finished_) {}

AtomicFile::~AtomicFile() { close_and_remove(); }

void AtomicFile::write(std::span<const std::byte> bytes) {
  TANDEM_CHECK(!finished_ && descriptor_ >= 0, fmt::format("{} is finished", path_.string()));
  size_bytes_ += static_cast<std::int64_t>(bytes.size());
  while (!bytes.empty()) {
    const std::size_t part = std::min(bytes.size(), kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(part));
    bytes = bytes.subspan(part);
    if (buffer_.size() == kBufferBytes) flush();
  }
}

void AtomicFile::flush() {
  std::size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t written = ::write(descriptor_, buffer_.data() + done, buffer_.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("cannot write", written < 0 ? errno : EIO);
    done += static_cast<std::size_t>(written);
  }
  buffer_.clear();
}

void AtomicFile::finish() {
  if (finished_) return;
  TANDEM_CHECK(descriptor_ >= 0, fmt::format("{} has failed before", path_.string()));
  flush();
  // Devices and pipes cannot be synced (EINVAL); what is written there is out of our hands.
  if (!temporary_.empty() && ::fsync(descriptor_) != 0) fail("cannot flush", errno);
  if (temporary_.filename() == kUnnamed) {
    temporary_ = name_temporary(descriptor_, folder_of(target_));
    if (temporary_.empty()) write_again_with_name();
  }
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot close", errno);
  finished_ = true;
}

void AtomicFile::write_again_with_name() {
  struct stat status {};
  (void)::fstat(descriptor_, &status);
  int named = -1;
  std::tie(named, temporary_) = open_named(folder_of(target_), 0600);
  if (named < 0) {
    const int reason = errno;
    temporary_.clear();
    fail("cannot create", reason);
  }
  (void)::fchmod(named, status.st_mode & 07777);
  const int unnamed = std::exchange(descriptor_, named);
  const bool copied = copy_contents(unnamed, named) && ::fsync(named) == 0;
  const int reason = errno;
  ::close(unnamed);
  if (!copied) fail("cannot write", reason);
}

void AtomicFile::commit() {
  finish();
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot rename the finished file to", errno);
  temporary_.clear();
  sync_folder(folder_of(target_));
}

void AtomicFile::close_and_remove() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

void AtomicFile::fail(std::string_view action, int error_number) {
  close_and_remove();
  throw IoError(fmt::format("{} {} ({} bytes so far): {}", action, path_.string(), size_bytes_,
                            std::generic_category().message(error_number)));
}

void write_file_atomically(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

std::string read_text_file(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    throw InputError(fmt::format("cannot read {}: it is a directory, a file is needed", path.string()));
  }
  // Not mapped: configurations may come through a pipe (`<(...)`), and may be edited while they are read.
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) throw InputError(fmt::format("cannot read {}: {}", path.string(), std::generic_category().message(errno)));
  std::string text;
  std::vector<char> block(std::size_t{1} << 16);
  while (const std::size_t count = std::fread(block.data(), 1, block.size(), file.get())) text.append(block.data(), count);
  if (std::ferror(file.get()) != 0) {
    throw IoError(
        fmt::format("cannot read {} beyond byte {}: {}", path.string(), text.size(), std::generic_category().message(errno)));
  }
  return text;
}

}  // namespace tandem

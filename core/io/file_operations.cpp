// SPDX-License-Identifier: Apache-2.0
#include "core/io/file_operations.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(std::string_view action, const fs::path& path, int error_number) {
  throw IoError(fmt::format("cannot {} {}: {}", action, path.string(), std::generic_category().message(error_number)));
}

class SystemFiles final : public FileOperations {
 public:
  int create(const fs::path& file) override {
    const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0) refuse("create", file, errno);
    return descriptor;
  }

  void write(int descriptor, const fs::path& file, std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) refuse("write", file, written < 0 ? errno : EIO);
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }

  void sync(int descriptor, const fs::path& file) override {
    if (::fsync(descriptor) != 0) refuse("flush", file, errno);
  }

  void close(int descriptor, const fs::path& file) override {
    if (::close(descriptor) != 0) refuse("close", file, errno);
  }

  void rename(const fs::path& from, const fs::path& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) refuse(fmt::format("rename {} to", from.string()), to, errno);
  }

  bool exchange(const fs::path& one, const fs::path& other) override {
    if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) return true;
    if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) return false;
    refuse(fmt::format("exchange {} with", one.string()), other, errno);
  }

  void sync_folder(const fs::path& folder) override {
    const int descriptor = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) refuse("open the folder", folder, errno);
    const int reason = ::fsync(descriptor) == 0 ? 0 : errno;
    ::close(descriptor);
    const bool cannot = reason == EINVAL || reason == ENOSYS || reason == ENOTSUP;
    if (reason != 0 && !cannot) refuse("flush the folder", folder, reason);
  }

  void make_folder(const fs::path& folder) override {
    if (::mkdir(folder.c_str(), 0777) == 0) return;
    const int reason = errno;
    std::error_code ignored;
    if (reason != EEXIST || !fs::is_directory(folder, ignored)) refuse("make the folder", folder, reason);
  }

  void remove(const fs::path& path) override {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) refuse("remove", path, error.value());
  }
};

}  // namespace

FileOperations& system_files() {
  static SystemFiles files;
  return files;
}

void write_new_file(FileOperations& files, const fs::path& file, const std::function<void(const ByteWriter&)>& fill) {
  const int descriptor = files.create(file);
  try {
    fill([&](std::span<const std::byte> bytes) { files.write(descriptor, file, bytes); });
    files.sync(descriptor, file);
  } catch (...) {
    ::close(descriptor);
    throw;
  }
  files.close(descriptor, file);
}

void write_new_file(FileOperations& files, const fs::path& file, std::span<const std::byte> bytes) {
  write_new_file(files, file, [&](const ByteWriter& write) { write(bytes); });
}

void replace_file(FileOperations& files, const fs::path& path, std::span<const std::byte> bytes) {
  const fs::path beside = path.string() + ".unfinished";
  files.remove(beside);
  try {
    write_new_file(files, beside, bytes);
  } catch (...) {
    std::error_code ignored;
    fs::remove(beside, ignored);
    throw;
  }
  files.rename(beside, path);
  files.sync_folder(path.parent_path());
}

void make_folders(FileOperations& files, const fs::path& folder) {
  std::error_code ignored;
  if (folder.empty() || fs::is_directory(folder, ignored)) return;
  make_folders(files, folder.parent_path());
  files.make_folder(folder);
  files.sync_folder(folder.parent_path());
}

fs::path replace_folder(FileOperations& files, const fs::path& whole, const fs::path& target) {
  std::error_code ignored;
  fs::path old;
  if (!fs::exists(fs::symlink_status(target, ignored))) {
    files.rename(whole, target);
  } else if (files.exchange(whole, target)) {
    old = whole;
  } else {
    old = target.string() + ".replaced";
    files.remove(old);
    files.rename(target, old);
    files.rename(whole, target);
  }
  files.sync_folder(target.parent_path());
  return old;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/folder_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/io/mapped_file.h"
#include "optimized/storage/file_copy.h"
#include "optimized/storage/store_key.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kUnfinished = ".unfinished";
// Between making a folder and writing into it, another process may remove it again, because it was empty.
constexpr int kFolderAttempts = 50;

// Drawn, because folders are shared between processes, perhaps of several machines, and a run that was killed leaves some.
std::string temporary_name() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}{:08x}", device(), device(), device());
}

}  // namespace

FolderStore::FolderStore(const fs::path& root, FileOperations& files)
    : root_(fs::absolute(root).lexically_normal()), files_(files) {}

std::string FolderStore::describe() const { return fmt::format("the folder {}", root_.string()); }

fs::path FolderStore::path_of(const std::string& key) const {
  check_key(key);
  TANDEM_CHECK(key != kUnfinished && !key.starts_with(fmt::format("{}/", kUnfinished)),
               fmt::format("'{}' is where a folder keeps what is not finished", key));
  return root_ / key;
}

fs::path FolderStore::unfinished() const { return root_ / kUnfinished; }

void FolderStore::refuse(const char* action, const std::string& key, const std::string& reason) const {
  throw StoreError(fmt::format("{}: cannot {} '{}': {}", describe(), action, key, reason));
}

bool FolderStore::give_name(const fs::path& target, const std::function<bool()>& rename_or_link) {
  for (int attempt = 1;; ++attempt) {
    try {
      make_folders(files_, target.parent_path());
      if (!rename_or_link()) return false;
      break;
    } catch (const IoError&) {
      if (attempt == kFolderAttempts) throw;
    }
  }
  files_.sync_folder(target.parent_path());
  return true;
}

void FolderStore::replace(const fs::path& written, const fs::path& target) {
  (void)give_name(target, [&] {
    files_.rename(written, target);
    return true;
  });
}

void FolderStore::put(const std::string& key, std::span<const std::byte> bytes) {
  const fs::path target = path_of(key);
  const fs::path written = unfinished() / temporary_name();
  try {
    make_folders(files_, unfinished());
    const RemovedOnError guard(written);
    write_new_file(files_, written, bytes);
    replace(written, target);
    guard.keep();
  } catch (const IoError& error) {
    refuse("write", key, error.what());
  }
}

bool FolderStore::put_if_absent(const std::string& key, std::span<const std::byte> bytes) {
  const fs::path target = path_of(key);
  const fs::path written = unfinished() / temporary_name();
  try {
    make_folders(files_, unfinished());
    const RemovedOnError guard(written);  // a link is a second name: the first goes in any case
    write_new_file(files_, written, bytes);
    return give_name(target, [&] {
      if (::link(written.c_str(), target.c_str()) == 0) return true;
      if (errno == EEXIST) return false;
      throw IoError(std::generic_category().message(errno));
    });
  } catch (const IoError& error) {
    refuse("write", key, error.what());
  }
}

void FolderStore::put_file(const std::string& key, const fs::path& file) {
  const fs::path target = path_of(key);
  const fs::path written = unfinished() / temporary_name();
  try {
    make_folders(files_, unfinished());
    const RemovedOnError guard(written);
    copy_to_new_file(files_, file, written);
    replace(written, target);
    guard.keep();
  } catch (const IoError& error) {
    refuse("write", key, error.what());
  }
}

std::vector<std::byte> FolderStore::get(const std::string& key) const {
  const std::optional<ObjectInfo> info = find(key);
  // A disk that is not mounted is a store that is not reached.
  if (std::error_code error; !info && !fs::is_directory(root_, error)) refuse("read", key, "the folder does not exist");
  if (!info) throw InputError(fmt::format("{}: there is no '{}'", describe(), key));
  return get_range(key, {0, info->bytes});
}

std::vector<std::byte> FolderStore::get_range(const std::string& key, Interval range) const {
  TANDEM_CHECK(range.begin >= 0 && range.begin <= range.end, fmt::format("[{}, {}) of '{}'", range.begin, range.end, key));
  const std::optional<ObjectInfo> info = find(key);
  if (!info) throw InputError(fmt::format("{}: there is no '{}'", describe(), key));
  if (range.end > info->bytes) {
    throw InputError(
        fmt::format("{}: '{}' has {} bytes, [{}, {}) was asked for", describe(), key, info->bytes, range.begin, range.end));
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(range.size()));
  try {
    FileReader(path_of(key)).read(range.begin, bytes);
  } catch (const IoError& error) {
    refuse("read", key, error.what());
  }
  return bytes;
}

void FolderStore::get_file(const std::string& key, const fs::path& file) const {
  if (!find(key)) throw InputError(fmt::format("{}: there is no '{}'", describe(), key));
  const RemovedOnError guard(file);
  copy_to_new_file(files_, path_of(key), file);
  guard.keep();
}

std::optional<ObjectInfo> FolderStore::find(const std::string& key) const {
  const fs::path path = path_of(key);
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return {};
  const std::uintmax_t bytes = fs::file_size(path, error);
  if (error) return {};
  return ObjectInfo{key, static_cast<std::int64_t>(bytes)};
}

std::vector<ObjectInfo> FolderStore::list(const std::string& prefix) const {
  check_key_prefix(prefix);
  std::vector<ObjectInfo> found;
  // Only below the deepest folder that the prefix names.
  const std::size_t slash = prefix.rfind('/');
  const fs::path top = slash == std::string::npos ? root_ : root_ / prefix.substr(0, slash);
  std::error_code error;
  if (!fs::is_directory(top, error)) return found;
  fs::recursive_directory_iterator at(top, error);
  for (; !error && at != fs::recursive_directory_iterator(); at.increment(error)) {
    if (at->path() == unfinished()) at.disable_recursion_pending();
    std::error_code vanished;
    if (!at->is_regular_file(vanished)) continue;
    ObjectInfo info{at->path().lexically_relative(root_).generic_string(), 0};
    if (!info.key.starts_with(prefix)) continue;
    const std::uintmax_t bytes = at->file_size(vanished);
    if (vanished) continue;
    info.bytes = static_cast<std::int64_t>(bytes);
    found.push_back(std::move(info));
  }
  // A folder that somebody removed meanwhile holds no object.
  if (error && error != std::errc::no_such_file_or_directory) refuse("list", prefix, error.message());
  std::ranges::sort(found, {}, &ObjectInfo::key);
  return found;
}

void FolderStore::remove(const std::string& key) {
  const fs::path path = path_of(key);
  if (!find(key)) return;
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) refuse("remove", key, std::generic_category().message(errno));
  try {
    fs::path folder = path.parent_path();
    for (; folder != root_ && ::rmdir(folder.c_str()) == 0; folder = folder.parent_path()) {
    }
    files_.sync_folder(folder);
  } catch (const IoError&) {
    // Another process has removed that folder too.
  }
}

}  // namespace tandem

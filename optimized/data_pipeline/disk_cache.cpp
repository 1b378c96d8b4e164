// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/disk_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/file_descriptor.h"
#include "core/io/file_operations.h"
#include "core/io/hash.h"
#include "optimized/storage/file_copy.h"

namespace tandem {
namespace {

constexpr const char* kSuffix = ".block";
constexpr const char* kUnfinished = ".unfinished";
constexpr auto kForgotten = std::chrono::hours(1);  // an unfinished file that old has lost its writer

/// In front of the bytes.
struct BlockHeader {
  std::array<char, 8> magic = {'t', 'a', 'n', 'd', 'e', 'm', 'b', '1'};
  std::uint64_t bytes = 0;
  Hash128 hash;
};
static_assert(sizeof(BlockHeader) == 32);

/// A new file under a name of its own, then renamed: a reader never sees a part. Not durable: what is lost is fetched again.
bool write_block(const std::filesystem::path& file, const std::filesystem::path& unfinished, std::span<const std::byte> bytes) {
  const BlockHeader header = {.bytes = bytes.size(), .hash = hash128(bytes)};
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  try {
    const FileDescriptor out(unfinished, O_WRONLY | O_CREAT | O_EXCL);
    system_files().write(out.value(), unfinished, std::as_bytes(std::span(&header, 1)));
    system_files().write(out.value(), unfinished, bytes);
    system_files().rename(unfinished, file);
    return true;
  } catch (const IoError&) {
    (void)::unlink(unfinished.c_str());
    return false;
  }
}

enum class Found { whole, damaged, none };

Found read_block(const std::filesystem::path& file, std::vector<std::byte>& bytes) {
  try {
    const FileReader in(file);
    BlockHeader header;
    in.read(0, std::as_writable_bytes(std::span(&header, 1)));
    if (header.magic != BlockHeader{}.magic || static_cast<std::uint64_t>(in.size_bytes()) != header.bytes + sizeof(header)) {
      return Found::damaged;
    }
    bytes.resize(header.bytes);
    in.read(sizeof(header), bytes);
    if (hash128(bytes) != header.hash) return Found::damaged;
  } catch (const InputError&) {
    return Found::none;
  } catch (const IoError&) {
    return Found::damaged;
  }
  std::error_code gone;  // by another process; else the order of use, for the next one
  std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now(), gone);
  return Found::whole;
}

}  // namespace

DiskCache::DiskCache(std::filesystem::path folder, std::int64_t capacity_bytes)
    : folder_(std::move(folder)), capacity_bytes_(capacity_bytes) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  const std::filesystem::path probe = folder_ / fmt::format("{}{}", ::getpid(), kUnfinished);
  const FileDescriptor writable(probe, O_WRONLY | O_CREAT);
  if (writable.value() < 0) {
    throw IoError(fmt::format("cannot write to the folder for cached data, {}: {}", folder_.string(),
                              std::generic_category().message(error ? error.value() : errno)));
  }
  (void)::unlink(probe.c_str());
  find_files();
}

void DiskCache::find_files() {
  using Clock = std::filesystem::file_time_type::clock;
  std::vector<std::pair<std::filesystem::file_time_type, std::string>> found;
  std::unordered_map<std::string, std::int64_t> sizes;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
    std::error_code gone;  // by another process, meanwhile
    const auto time = at->last_write_time(gone);
    if (gone || !at->is_regular_file(gone)) continue;
    const std::string extension = at->path().extension().string();
    if (extension == kUnfinished && Clock::now() - time > kForgotten) std::filesystem::remove(at->path(), gone);
    if (extension != kSuffix) continue;
    std::filesystem::path name = at->path().lexically_relative(folder_);
    name.replace_extension();
    sizes[name.string()] = static_cast<std::int64_t>(at->file_size(gone));
    found.emplace_back(time, name.string());
  }
  std::sort(found.begin(), found.end());
  const std::lock_guard lock(mutex_);
  for (const auto& [time, name] : found) insert(name, sizes[name]);
  make_room(0);
}

std::filesystem::path DiskCache::path_of(const std::string& name) const {
  std::filesystem::path path = folder_ / name;
  return path += kSuffix;
}

void DiskCache::insert(const std::string& name, std::int64_t bytes) {
  erase(name);
  order_.push_front(name);
  entries_[name] = {bytes, order_.begin()};
  counts_.held_bytes += bytes;
}

void DiskCache::erase(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return;
  counts_.held_bytes -= found->second.bytes;
  order_.erase(found->second.place);
  entries_.erase(found);
}

void DiskCache::make_room(std::int64_t bytes) {
  while (!order_.empty() && counts_.held_bytes + bytes > capacity_bytes_) {
    const std::string name = order_.back();
    (void)::unlink(path_of(name).c_str());
    erase(name);
    ++counts_.evictions;
  }
}

std::optional<std::vector<std::byte>> DiskCache::get(const std::string& name) {
  std::vector<std::byte> bytes;
  const Found found = read_block(path_of(name), bytes);
  if (found == Found::damaged) (void)::unlink(path_of(name).c_str());
  const std::lock_guard lock(mutex_);
  if (found != Found::whole) {
    erase(name);
    ++counts_.misses;
    counts_.damaged += found == Found::damaged ? 1 : 0;
    return std::nullopt;
  }
  // It may have been removed since it was opened, or put there by another process.
  if (::access(path_of(name).c_str(), F_OK) == 0) insert(name, static_cast<std::int64_t>(bytes.size() + sizeof(BlockHeader)));
  make_room(0);
  ++counts_.hits;
  counts_.hit_bytes += static_cast<std::int64_t>(bytes.size());
  return bytes;
}

void DiskCache::put(const std::string& name, std::span<const std::byte> bytes) {
  const auto file_bytes = static_cast<std::int64_t>(bytes.size() + sizeof(BlockHeader));
  if (file_bytes > capacity_bytes_) return;
  std::filesystem::path unfinished;
  {
    const std::lock_guard lock(mutex_);
    erase(name);
    make_room(file_bytes);
    insert(name, file_bytes);  // before it is written: at no moment is there more than the capacity
    unfinished = folder_ / fmt::format("{}-{}{}", ::getpid(), ++written_, kUnfinished);
  }
  const bool written = write_block(path_of(name), unfinished, bytes);
  const std::lock_guard lock(mutex_);
  if (!written) {
    erase(name);
    ++counts_.refused;
  } else if (!entries_.contains(name)) {
    (void)::unlink(path_of(name).c_str());  // others needed its room while it was written
  }
}

DiskCacheCounts DiskCache::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace tandem

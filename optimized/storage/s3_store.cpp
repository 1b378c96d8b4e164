// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/s3_store.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/io/file_operations.h"
#include "optimized/storage/file_copy.h"
#include "optimized/storage/s3_session.h"
#include "optimized/storage/store_key.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMinPartBytes = std::int64_t{5} << 20;

class S3Store final : public ObjectStore {
 public:
  S3Store(const std::string& bucket, const std::string& prefix, const StoreAccess& access) : session_(bucket, prefix, access) {}

  void put(const std::string& key, std::span<const std::byte> bytes) override {
    check_key(key);
    const auto size = static_cast<std::int64_t>(bytes.size());
    if (size <= session_.access().part_bytes) return session_.put(key, bytes);
    session_.put_in_parts(key, size, [&](std::int64_t offset, std::int64_t count) {
      return bytes.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(count));
    });
  }

  bool put_if_absent(const std::string& key, std::span<const std::byte> bytes) override {
    check_key(key);
    return session_.put_if_absent(key, bytes);
  }

  void put_file(const std::string& key, const fs::path& file) override {
    check_key(key);
    const FileReader reader(file);
    std::vector<std::byte> part;
    const s3::Source source = [&](std::int64_t offset, std::int64_t count) {
      part.resize(static_cast<std::size_t>(count));
      reader.read(offset, part);
      return std::span<const std::byte>(part);
    };
    const std::int64_t size = reader.size_bytes();
    if (size <= session_.access().part_bytes) return session_.put(key, source(0, size));
    session_.put_in_parts(key, size, source);
  }

  std::vector<std::byte> get(const std::string& key) const override { return read(key, {}); }

  std::vector<std::byte> get_range(const std::string& key, Interval range) const override {
    TANDEM_CHECK(range.begin >= 0 && range.begin <= range.end, fmt::format("[{}, {}) of '{}'", range.begin, range.end, key));
    // A range cannot be empty in HTTP; that the object has the place must hold all the same.
    if (range.size() > 0) return read(key, range);
    const std::optional<ObjectInfo> info = find(key);
    if (!info) throw InputError(fmt::format("{}: there is no '{}'", describe(), key));
    if (range.end > info->bytes) {
      throw InputError(
          fmt::format("{}: '{}' has {} bytes, [{}, {}) was asked for", describe(), key, info->bytes, range.begin, range.end));
    }
    return {};
  }

  void get_file(const std::string& key, const fs::path& file) const override {
    check_key(key);
    const RemovedOnError guard(file);
    FileOperations& files = system_files();
    int descriptor = files.create(file);
    try {
      session_.download(key, {},
                        {.restart =
                             [&] {
                               if (::ftruncate(descriptor, 0) != 0 || ::lseek(descriptor, 0, SEEK_SET) != 0) {
                                 throw IoError(fmt::format("cannot cut {}", file.string()));
                               }
                             },
                         .append = [&](std::span<const std::byte> piece) { files.write(descriptor, file, piece); }});
      files.sync(descriptor, file);
      files.close(std::exchange(descriptor, -1), file);
    } catch (...) {
      if (descriptor >= 0) ::close(descriptor);
      throw;
    }
    guard.keep();
  }

  std::optional<ObjectInfo> find(const std::string& key) const override {
    check_key(key);
    const s3::Reply reply = session_.ask({.method = "HEAD", .path = session_.path_of(key)});
    if (reply.failure.empty() && reply.status == 404) return {};
    if (!reply.good()) session_.refuse("look for", key, reply);
    return ObjectInfo{key, std::stoll("0" + reply.header("content-length"))};
  }

  std::vector<ObjectInfo> list(const std::string& prefix) const override {
    check_key_prefix(prefix);
    const std::string full_prefix = session_.full_key(prefix);
    const std::size_t own_bytes = full_prefix.size() - prefix.size();
    std::vector<ObjectInfo> found;
    std::string continuation;
    do {
      s3::Listing page = list_page(prefix, full_prefix, continuation);
      for (ObjectInfo& info : page.objects) {
        if (!info.key.starts_with(full_prefix)) continue;
        info.key.erase(0, own_bytes);
        // Other programs may have left objects that have no key here: "a/", which stands for a folder.
        if (fault_of_key(info.key).empty()) found.push_back(std::move(info));
      }
      continuation = std::move(page.continuation);
    } while (!continuation.empty());
    std::ranges::sort(found, {}, &ObjectInfo::key);
    return found;
  }

  void remove(const std::string& key) override {
    check_key(key);
    const s3::Reply reply = session_.ask({.method = "DELETE", .path = session_.path_of(key)});
    const bool is_gone = reply.failure.empty() && reply.status == 404 && s3::read_refusal(reply).code != "NoSuchBucket";
    if (!reply.good() && !is_gone) session_.refuse("remove", key, reply);
  }

  std::string describe() const override { return session_.describe(); }

 private:
  std::vector<std::byte> read(const std::string& key, std::optional<Interval> range) const {
    check_key(key);
    std::vector<std::byte> bytes;
    if (range) bytes.reserve(static_cast<std::size_t>(range->size()));
    session_.download(
        key, range,
        {.restart = [&] { bytes.clear(); },
         .append = [&](std::span<const std::byte> piece) { bytes.insert(bytes.end(), piece.begin(), piece.end()); }});
    return bytes;
  }

  s3::Listing list_page(const std::string& prefix, const std::string& full_prefix, const std::string& continuation) const {
    s3::Request request{.method = "GET", .path = session_.bucket_path(), .query = {{"list-type", "2"}, {"prefix", full_prefix}}};
    if (!continuation.empty()) request.query.emplace_back("continuation-token", continuation);
    const s3::Reply reply = session_.ask(request, [](const s3::Reply& answer) -> std::string {
      return s3::read_listing(answer) ? "" : "the reply is no list of objects";
    });
    if (!reply.good()) session_.refuse("list", prefix, reply);
    return std::move(*s3::read_listing(reply));
  }

  // Reading too keeps connections and draws delays.
  mutable s3::Session session_;
};

}  // namespace

std::shared_ptr<ObjectStore> open_s3_store(const std::string& bucket, const std::string& prefix, const StoreAccess& access) {
  TANDEM_CHECK(access.part_bytes >= kMinPartBytes, "parts of an upload have at least 5 MiB");
  TANDEM_CHECK(access.attempts >= 1);
  StoreAccess complete = access;
  while (complete.endpoint.ends_with('/')) complete.endpoint.pop_back();
  if (complete.endpoint.empty()) complete.endpoint = fmt::format("https://s3.{}.amazonaws.com", complete.region);
  return std::make_shared<S3Store>(bucket, prefix, complete);
}

}  // namespace tandem

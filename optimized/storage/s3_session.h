// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>

#include "optimized/storage/s3_reply.h"
#include "optimized/storage/s3_request.h"

namespace tandem::s3 {

/// Why a reply with status 2xx is not believed; empty: it is.
using Doubt = std::function<std::string(const Reply&)>;

/// Where an object's bytes go, from the first on; once more from the first after restart().
struct Target {
  std::function<void()> restart;
  std::function<void(std::span<const std::byte>)> append;
};

/// Bytes [offset, offset + size) of what is uploaded; valid until the next call.
using Source = std::function<std::span<const std::byte>(std::int64_t offset, std::int64_t size)>;

/// Requests about one bucket, made again where that can help. Throws StoreError in one line. Safe to use from several threads.
class Session {
 public:
  Session(std::string bucket, std::string prefix, StoreAccess access);

  /// At most access().attempts times, until the reply is one that will not change. `reply.attempts` counts them.
  [[nodiscard]] Reply ask(const Request& request, const Doubt& doubt = {});
  /// The object's bytes; a transfer that broke off is taken up where it did. `attempts` counts failures in a row that brought
  /// less than part_bytes. Where the service names the content's MD5 and it differs, or the object changed meanwhile, from the
  /// start again. InputError where there is no such object, or it has no such bytes.
  void download(const std::string& key, std::optional<Interval> range, const Target& target);
  /// In one request. `headers` are added. False: refused because the object exists (412).
  void put(const std::string& key, std::span<const std::byte> bytes);
  [[nodiscard]] bool put_if_absent(const std::string& key, std::span<const std::byte> bytes);
  /// In parts, of which one is in memory. What was uploaded is given up where it fails.
  void put_in_parts(const std::string& key, std::int64_t bytes, const Source& source);

  [[nodiscard]] const StoreAccess& access() const noexcept { return client_.access(); }
  [[nodiscard]] std::string bucket_path() const { return "/" + bucket_; }
  [[nodiscard]] std::string path_of(const std::string& key) const { return bucket_path() + "/" + full_key(key); }
  /// As the bucket has it.
  [[nodiscard]] std::string full_key(const std::string& key) const { return prefix_.empty() ? key : prefix_ + "/" + key; }
  [[nodiscard]] std::string describe() const;
  [[noreturn]] void refuse(const char* action, const std::string& key, const Reply& reply) const;

  void wait_before_retry(int failures);

 private:
  class Download;
  class Upload;

  std::string bucket_, prefix_;
  Client client_;
  std::mutex mutex_;  // guards the one below
  std::minstd_rand draws_;
};

}  // namespace tandem::s3

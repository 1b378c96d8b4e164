// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch.h"
#include "core/error.h"

namespace tandem {

/// A store cannot be reached, or refused a request after all retries. The message names store, key, request and reason.
class StoreError : public IoError {
  using IoError::IoError;
};

/// A line of a listing.
struct ObjectInfo {
  std::string key;
  std::int64_t bytes = 0;
};

/// Named byte strings: an S3-compatible service, or a folder. An object appears under its key whole or not at all. Keys are
/// relative, parts separated by '/', without "..": ContractError otherwise. Safe to use from several threads.
///
/// Members throw StoreError; a key that does not exist is an InputError where it is read.
class ObjectStore {
 public:
  ObjectStore() = default;
  ObjectStore(const ObjectStore&) = delete;
  ObjectStore& operator=(const ObjectStore&) = delete;
  virtual ~ObjectStore() = default;

  virtual void put(const std::string& key, std::span<const std::byte> bytes) = 0;
  /// False, and nothing written, where the key exists: of several writers one wins.
  [[nodiscard]] virtual bool put_if_absent(const std::string& key, std::span<const std::byte> bytes) = 0;
  /// A file of any size, in parts with bounded memory.
  virtual void put_file(const std::string& key, const std::filesystem::path& file) = 0;

  [[nodiscard]] virtual std::vector<std::byte> get(const std::string& key) const = 0;
  /// Bytes [range.begin, range.end), which must exist.
  [[nodiscard]] virtual std::vector<std::byte> get_range(const std::string& key, Interval range) const = 0;
  /// To a new file, with bounded memory; the file does not exist afterwards where this throws.
  virtual void get_file(const std::string& key, const std::filesystem::path& file) const = 0;

  [[nodiscard]] virtual std::optional<ObjectInfo> find(const std::string& key) const = 0;
  /// All objects whose key begins with `prefix`, by key.
  [[nodiscard]] virtual std::vector<ObjectInfo> list(const std::string& prefix) const = 0;
  /// A key that does not exist is passed over.
  virtual void remove(const std::string& key) = 0;

  /// "s3://bucket/prefix at http://127.0.0.1:8086", for messages.
  [[nodiscard]] virtual std::string describe() const = 0;
};

/// Who asks, and how patiently. The command line fills it from the variables that every S3 program reads: AWS_ACCESS_KEY_ID,
/// AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL.
struct StoreAccess {
  std::string endpoint;  ///< "http://127.0.0.1:8086"; empty: Amazon's of the region
  std::string region = "us-east-1";
  std::string access_key, secret_key, session_token;
  int attempts = 5;                  ///< of each request that may succeed when it is made again
  double first_delay_seconds = 0.2;  ///< doubled each time, with jitter
  double stall_seconds = 30;         ///< a transfer slower than 1 KB/s for so long is given up, and made again
  double connect_seconds = 10;
  std::int64_t part_bytes = std::int64_t{16} << 20;  ///< of a multipart upload, at least 5 MiB
};

/// "s3://BUCKET[/PREFIX]", or a folder: "file:///PATH" or a plain path, made when first written to. Does not connect. Throws
/// InputError for an URL that is none of these, and for s3:// without keys.
[[nodiscard]] std::shared_ptr<ObjectStore> open_store(std::string_view url, const StoreAccess& access);

}  // namespace tandem

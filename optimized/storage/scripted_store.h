// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "optimized/storage/object_store.h"

namespace tandem {

/// What goes wrong in a ScriptedStore, and how slow it is. Operations, uploads and downloads are counted from 0 in the order in
/// which they begin; every member of ObjectStore but describe() is one operation, put*() is an upload too, get*() a download.
struct StoreScript {
  static constexpr std::int64_t kForEver = std::numeric_limits<std::int64_t>::max();

  /// Operations [begin, end) find the store down: StoreError, nothing done.
  Interval down{};
  /// The transfers from number `index` on, `in_a_row` of them, break off after `byte` bytes, or at their end where they are
  /// shorter: StoreError. An upload that breaks off leaves nothing, a download no file.
  struct Break {
    std::int64_t index = 0;
    std::int64_t byte = 0;
    std::int64_t in_a_row = 1;
  };
  std::optional<Break> broken_upload = {};
  std::optional<Break> broken_download = {};

  double latency_seconds = 0;   ///< of each operation
  double bytes_per_second = 0;  ///< of each transfer by itself; 0: as fast as the store behind
  /// Passes the time. Empty: the thread sleeps. Called without a lock.
  std::function<void(double seconds)> sleep = {};
};

struct StoreCounts {
  std::int64_t operations = 0;  ///< those that found the store down included
  std::int64_t uploads = 0;
  std::int64_t downloads = 0;
  std::int64_t uploaded_bytes = 0;  ///< what broke off counts as far as it came
  std::int64_t downloaded_bytes = 0;
};

/// For tests and suites: another store, seen through a bad connection.
class ScriptedStore final : public ObjectStore {
 public:
  explicit ScriptedStore(std::shared_ptr<ObjectStore> store, StoreScript script = {});

  /// Another script from now on; what it numbers, and counts(), begin again at 0.
  void set_script(StoreScript script);
  [[nodiscard]] StoreCounts counts() const;
  [[nodiscard]] ObjectStore& behind() noexcept { return *store_; }

  void put(const std::string& key, std::span<const std::byte> bytes) override;
  bool put_if_absent(const std::string& key, std::span<const std::byte> bytes) override;
  void put_file(const std::string& key, const std::filesystem::path& file) override;
  [[nodiscard]] std::vector<std::byte> get(const std::string& key) const override;
  [[nodiscard]] std::vector<std::byte> get_range(const std::string& key, Interval range) const override;
  void get_file(const std::string& key, const std::filesystem::path& file) const override;
  [[nodiscard]] std::optional<ObjectInfo> find(const std::string& key) const override;
  [[nodiscard]] std::vector<ObjectInfo> list(const std::string& prefix) const override;
  void remove(const std::string& key) override;
  [[nodiscard]] std::string describe() const override;

 private:
  void begin_operation(const char* action, const std::string& key) const;
  void upload(const std::string& key, std::int64_t bytes) const;
  void download(const std::string& key, std::int64_t bytes) const;
  void transfer(const char* action, const std::string& key, std::int64_t bytes, const std::optional<StoreScript::Break>& broken,
                std::int64_t index, std::int64_t StoreCounts::*counted) const;
  void pass_time(double seconds) const;
  [[nodiscard]] std::int64_t size_of(const std::string& key) const;

  std::shared_ptr<ObjectStore> store_;
  mutable std::mutex mutex_;  // guards the two below
  StoreScript script_;
  mutable StoreCounts counts_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/scripted_store.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace tandem {

ScriptedStore::ScriptedStore(std::shared_ptr<ObjectStore> store, StoreScript script)
    : store_(std::move(store)), script_(std::move(script)) {
  TANDEM_CHECK(store_ != nullptr);
}

void ScriptedStore::set_script(StoreScript script) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(script);
  counts_ = {};
}

StoreCounts ScriptedStore::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void ScriptedStore::pass_time(double seconds) const {
  if (seconds <= 0) return;
  std::function<void(double)> sleep;
  {
    const std::lock_guard lock(mutex_);
    sleep = script_.sleep;
  }
  if (sleep) {
    sleep(seconds);
  } else {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
}

void ScriptedStore::begin_operation(const char* action, const std::string& key) const {
  double latency_seconds = 0;
  bool down = false;
  {
    const std::lock_guard lock(mutex_);
    const std::int64_t index = counts_.operations++;
    down = index >= script_.down.begin && index < script_.down.end;
    latency_seconds = script_.latency_seconds;
  }
  pass_time(latency_seconds);
  if (down) throw StoreError(fmt::format("{}: cannot {} '{}': the store is down", describe(), action, key));
}

void ScriptedStore::transfer(const char* action, const std::string& key, std::int64_t bytes,
                             const std::optional<StoreScript::Break>& broken, std::int64_t index,
                             std::int64_t StoreCounts::*counted) const {
  const bool breaks = broken && index >= broken->index && index < broken->index + broken->in_a_row;
  const std::int64_t moved = breaks ? std::min(bytes, broken->byte) : bytes;
  double bytes_per_second = 0;
  {
    const std::lock_guard lock(mutex_);
    counts_.*counted += moved;
    bytes_per_second = script_.bytes_per_second;
  }
  if (bytes_per_second > 0) pass_time(static_cast<double>(moved) / bytes_per_second);
  if (breaks) throw StoreError(fmt::format("{}: cannot {} '{}': broken off after {} bytes", describe(), action, key, moved));
}

void ScriptedStore::upload(const std::string& key, std::int64_t bytes) const {
  std::optional<StoreScript::Break> broken;
  std::int64_t index = 0;
  {
    const std::lock_guard lock(mutex_);
    broken = script_.broken_upload;
    index = counts_.uploads++;
  }
  transfer("write", key, bytes, broken, index, &StoreCounts::uploaded_bytes);
}

void ScriptedStore::download(const std::string& key, std::int64_t bytes) const {
  std::optional<StoreScript::Break> broken;
  std::int64_t index = 0;
  {
    const std::lock_guard lock(mutex_);
    broken = script_.broken_download;
    index = counts_.downloads++;
  }
  transfer("read", key, bytes, broken, index, &StoreCounts::downloaded_bytes);
}

std::int64_t ScriptedStore::size_of(const std::string& key) const {
  const std::optional<ObjectInfo> info = store_->find(key);
  return info ? info->bytes : 0;
}

void ScriptedStore::put(const std::string& key, std::span<const std::byte> bytes) {
  begin_operation("write", key);
  upload(key, static_cast<std::int64_t>(bytes.size()));
  store_->put(key, bytes);
}

bool ScriptedStore::put_if_absent(const std::string& key, std::span<const std::byte> bytes) {
  begin_operation("write", key);
  upload(key, static_cast<std::int64_t>(bytes.size()));
  return store_->put_if_absent(key, bytes);
}

void ScriptedStore::put_file(const std::string& key, const std::filesystem::path& file) {
  begin_operation("write", key);
  std::error_code missing;
  const std::uintmax_t bytes = std::filesystem::file_size(file, missing);
  upload(key, missing ? 0 : static_cast<std::int64_t>(bytes));
  store_->put_file(key, file);
}

std::vector<std::byte> ScriptedStore::get(const std::string& key) const {
  begin_operation("read", key);
  std::vector<std::byte> bytes = store_->get(key);
  download(key, static_cast<std::int64_t>(bytes.size()));
  return bytes;
}

std::vector<std::byte> ScriptedStore::get_range(const std::string& key, Interval range) const {
  begin_operation("read", key);
  std::vector<std::byte> bytes = store_->get_range(key, range);
  download(key, range.size());
  return bytes;
}

void ScriptedStore::get_file(const std::string& key, const std::filesystem::path& file) const {
  begin_operation("read", key);
  download(key, size_of(key));
  store_->get_file(key, file);
}

std::optional<ObjectInfo> ScriptedStore::find(const std::string& key) const {
  begin_operation("look for", key);
  return store_->find(key);
}

std::vector<ObjectInfo> ScriptedStore::list(const std::string& prefix) const {
  begin_operation("list", prefix);
  return store_->list(prefix);
}

void ScriptedStore::remove(const std::string& key) {
  begin_operation("remove", key);
  store_->remove(key);
}

std::string ScriptedStore::describe() const { return store_->describe(); }

}  // namespace tandem

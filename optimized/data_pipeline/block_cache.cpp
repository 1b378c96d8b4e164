// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/block_cache.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

BlockCache::BlockCache(std::shared_ptr<const ObjectStore> store, std::string key, std::int64_t object_bytes,
                       std::shared_ptr<DiskCache> disk, std::string name, const BlockCacheOptions& options)
    : store_(std::move(store)),
      key_(std::move(key)),
      object_bytes_(object_bytes),
      disk_(std::move(disk)),
      name_(std::move(name)),
      options_(options) {
  TANDEM_CHECK(options_.block_bytes >= 1 && options_.read_ahead_blocks >= 0,
               fmt::format("blocks of {} bytes", options_.block_bytes));
  if (options_.memory_bytes < options_.block_bytes) {
    throw InputError(fmt::format("the cache in memory has {} bytes, it must hold a block of {} at least", options_.memory_bytes,
                                 options_.block_bytes));
  }
  // A block that is read ahead must not push out the one that is being read.
  options_.read_ahead_blocks = std::min(options_.read_ahead_blocks, options_.memory_bytes / options_.block_bytes - 1);
  if (options_.read_ahead_blocks > 0) {
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }
}

std::int64_t BlockCache::num_blocks() const noexcept { return (object_bytes_ + options_.block_bytes - 1) / options_.block_bytes; }

std::int64_t BlockCache::bytes_of(std::int64_t block) const noexcept {
  return std::min(options_.block_bytes, object_bytes_ - block * options_.block_bytes);
}

void BlockCache::read(std::int64_t offset, std::span<std::byte> out) {
  const auto count = static_cast<std::int64_t>(out.size());
  TANDEM_CHECK(offset >= 0 && offset <= object_bytes_ - count,
               fmt::format("bytes [{}, {}) of {}", offset, offset + count, object_bytes_));
  while (!out.empty()) {
    const std::int64_t number = offset / options_.block_bytes;
    const std::int64_t skipped = offset % options_.block_bytes;
    const Block block = acquire(number);
    const auto part = std::min<std::int64_t>(static_cast<std::int64_t>(out.size()), bytes_of(number) - skipped);
    std::copy_n(block->begin() + skipped, part, out.begin());
    out = out.subspan(static_cast<std::size_t>(part));
    offset += part;
  }
  const std::lock_guard lock(mutex_);
  counts_.memory_bytes += count;
}

BlockCache::Block BlockCache::acquire(std::int64_t block) {
  std::unique_lock lock(mutex_);
  plan_read_ahead(block);
  if (const auto held = held_.find(block); held != held_.end()) {
    ++counts_.memory_hits;
    order_.splice(order_.begin(), order_, held->second.place);
    return held->second.bytes;
  }
  ++counts_.memory_misses;
  while (const std::shared_ptr<Flight> flight = flight_of(block)) {
    ++counts_.joined;
    landed_.wait(lock, [&] { return flight->done; });
    if (flight->bytes) return flight->bytes;
    // One in the background that failed is made again by the first who needs the block, to be told why.
    if (!flight->in_background) std::rethrow_exception(flight->failure);
  }
  return fly(lock, block, Wanted::now);
}

void BlockCache::acquire_soon(std::int64_t block) {
  std::unique_lock lock(mutex_);
  if (held_.contains(block) || flights_.contains(block)) return;
  if (fly(lock, block, Wanted::soon)) ++counts_.read_ahead;
}

std::shared_ptr<BlockCache::Flight> BlockCache::flight_of(std::int64_t block) const {
  const auto found = flights_.find(block);
  return found == flights_.end() ? nullptr : found->second;
}

BlockCache::Block BlockCache::fly(std::unique_lock<std::mutex>& lock, std::int64_t block, Wanted wanted) {
  const auto flight = std::make_shared<Flight>();
  flight->in_background = wanted == Wanted::soon;
  flights_[block] = flight;
  lock.unlock();
  Block bytes;
  std::exception_ptr failure;
  try {
    bytes = fetch(block);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  flight->bytes = bytes;
  flight->failure = failure;
  flight->done = true;
  flights_.erase(block);
  if (bytes) hold(block, bytes);
  landed_.notify_all();
  if (failure) std::rethrow_exception(failure);
  return bytes;
}

BlockCache::Block BlockCache::fetch(std::int64_t block) {
  const std::string file = fmt::format("{}/{:08}-{}", name_, block, options_.block_bytes);
  if (auto kept = disk_->get(file); kept && static_cast<std::int64_t>(kept->size()) == bytes_of(block)) {
    return std::make_shared<const std::vector<std::byte>>(std::move(*kept));
  }
  const std::int64_t begin = block * options_.block_bytes;
  std::vector<std::byte> bytes;
  try {
    bytes = store_->get_range(key_, {begin, begin + bytes_of(block)});
    if (static_cast<std::int64_t>(bytes.size()) != bytes_of(block)) {
      throw StoreError(fmt::format("{}: {} gave {} bytes from {} on, {} were asked for", store_->describe(), key_, bytes.size(),
                                   begin, bytes_of(block)));
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ++counts_.failures;
    throw;
  }
  {
    const std::lock_guard lock(mutex_);
    ++counts_.fetches;
    counts_.fetched_bytes += static_cast<std::int64_t>(bytes.size());
  }
  disk_->put(file, bytes);
  return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
}

void BlockCache::hold(std::int64_t block, const Block& bytes) {
  if (held_.contains(block)) return;
  const auto size = static_cast<std::int64_t>(bytes->size());
  while (!order_.empty() && counts_.held_bytes + size > options_.memory_bytes) {
    const auto last = held_.find(order_.back());
    counts_.held_bytes -= static_cast<std::int64_t>(last->second.bytes->size());
    held_.erase(last);
    order_.pop_back();
    ++counts_.memory_evictions;
  }
  order_.push_front(block);
  held_[block] = {bytes, order_.begin()};
  counts_.held_bytes += size;
  counts_.most_held_bytes = std::max(counts_.most_held_bytes, counts_.held_bytes);
}

void BlockCache::plan_read_ahead(std::int64_t block) {
  const bool in_order = block == last_block_ + 1;
  if (block == last_block_) return;
  last_block_ = block;
  if (!in_order || options_.read_ahead_blocks == 0) return;
  soon_.clear();
  for (std::int64_t next = block + 1; next < std::min(num_blocks(), block + 1 + options_.read_ahead_blocks); ++next) {
    if (!held_.contains(next) && !flights_.contains(next)) soon_.push_back(next);
  }
  if (!soon_.empty()) wanted_.notify_one();
}

void BlockCache::run(const std::stop_token& stop) {
  for (;;) {
    std::int64_t block = 0;
    {
      std::unique_lock lock(mutex_);
      if (!wanted_.wait(lock, stop, [&] { return !soon_.empty(); })) return;
      if (stop.stop_requested()) return;
      block = soon_.front();
      soon_.pop_front();
    }
    try {
      acquire_soon(block);
    } catch (const Error&) {
      // Counted. The reader that needs the block asks for it itself, and gets the error.
    }
  }
}

BlockCacheCounts BlockCache::counts() const {
  std::unique_lock lock(mutex_);
  BlockCacheCounts counts = counts_;
  lock.unlock();
  counts.disk = disk_->counts();
  return counts;
}

}  // namespace tandem

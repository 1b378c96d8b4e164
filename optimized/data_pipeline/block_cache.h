// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "optimized/data_pipeline/disk_cache.h"
#include "optimized/storage/object_store.h"

namespace tandem {

struct BlockCacheOptions {
  std::int64_t block_bytes = std::int64_t{4} << 20;     ///< asked for at a time
  std::int64_t memory_bytes = std::int64_t{256} << 20;  ///< held at most, besides the blocks being fetched
  std::int64_t read_ahead_blocks = 2;                   ///< fetched in the background where blocks are read in order; 0: none
};

struct BlockCacheCounts {
  std::int64_t memory_hits = 0;
  std::int64_t memory_misses = 0;
  std::int64_t memory_bytes = 0;  ///< given to readers
  std::int64_t memory_evictions = 0;
  std::int64_t held_bytes = 0;
  std::int64_t most_held_bytes = 0;
  std::int64_t joined = 0;      ///< of the misses, those that waited for a fetch under way
  std::int64_t read_ahead = 0;  ///< blocks that were fetched before they were asked for
  std::int64_t fetches = 0;     ///< requests to the store that were answered
  std::int64_t fetched_bytes = 0;
  std::int64_t failures = 0;  ///< requests that were not
  DiskCacheCounts disk;       ///< of the whole folder
};

/// An object of a store, read through two caches: blocks in memory, behind them blocks on the local disk, behind those the store.
/// A block that several threads ask for is fetched once. Safe to use from several threads.
class BlockCache {
 public:
  /// Shares the store and the disk cache. `name`: of the object's blocks on the disk, the same for the same bytes alone.
  /// Throws InputError where the memory does not hold one block.
  BlockCache(std::shared_ptr<const ObjectStore> store, std::string key, std::int64_t object_bytes,
             std::shared_ptr<DiskCache> disk, std::string name, const BlockCacheOptions& options);
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;
  ~BlockCache() = default;

  /// Bytes [offset, offset + out.size()) of the object. Throws ContractError beyond its end, and what the store throws for a
  /// block that is in neither cache: another one, or the same later, can be read all the same.
  void read(std::int64_t offset, std::span<std::byte> out);

  [[nodiscard]] BlockCacheCounts counts() const;

 private:
  using Block = std::shared_ptr<const std::vector<std::byte>>;
  struct Held {
    Block bytes;
    std::list<std::int64_t>::iterator place;
  };
  /// A fetch that is under way.
  struct Flight {
    Block bytes;
    std::exception_ptr failure;
    bool in_background = false;
    bool done = false;
  };
  enum class Wanted { now, soon };

  [[nodiscard]] Block acquire(std::int64_t block);
  void acquire_soon(std::int64_t block);
  [[nodiscard]] std::shared_ptr<Flight> flight_of(std::int64_t block) const;
  /// Fetches the block without the lock, and holds it.
  Block fly(std::unique_lock<std::mutex>& lock, std::int64_t block, Wanted wanted);
  [[nodiscard]] Block fetch(std::int64_t block);
  void hold(std::int64_t block, const Block& bytes);
  void plan_read_ahead(std::int64_t block);
  void run(const std::stop_token& stop);
  [[nodiscard]] std::int64_t num_blocks() const noexcept;
  [[nodiscard]] std::int64_t bytes_of(std::int64_t block) const noexcept;

  std::shared_ptr<const ObjectStore> store_;
  std::string key_;
  std::int64_t object_bytes_;
  std::shared_ptr<DiskCache> disk_;
  std::string name_;
  BlockCacheOptions options_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable landed_;
  std::condition_variable_any wanted_;
  std::unordered_map<std::int64_t, Held> held_;
  std::list<std::int64_t> order_;  ///< the one used last in front
  std::unordered_map<std::int64_t, std::shared_ptr<Flight>> flights_;
  std::deque<std::int64_t> soon_;  ///< for the background
  std::int64_t last_block_ = -2;
  BlockCacheCounts counts_;
  std::jthread thread_;  // the last member: it uses the others until it is joined
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/block_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "core/rng.h"
#include "optimized/storage/folder_store.h"
#include "optimized/storage/scripted_store.h"

namespace tandem {
namespace {

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << "says: " << (message)

constexpr std::int64_t kBlock = 100;
constexpr std::int64_t kHeader = 32;
template <class Condition>
void wait_until(const Condition& holds) {
  while (!holds()) std::this_thread::yield();
}

const StoreScript kDown = {.down = {0, StoreScript::kForEver}};

std::vector<std::byte> random_bytes(std::int64_t count) {
  CounterRng rng(1, "object");
  std::vector<std::byte> bytes(static_cast<std::size_t>(count));
  for (std::byte& b : bytes) b = static_cast<std::byte>(rng.next_below(256));
  return bytes;
}

/// An object of 1050 bytes, ten blocks and a half, in a store that can be made to fail.
class Caches : public testing::Test {
 protected:
  Caches() { store_->put("x.bin", object_); }

  [[nodiscard]] std::unique_ptr<BlockCache> open(std::int64_t memory_bytes, std::int64_t disk_bytes = 1 << 20,
                                                 std::int64_t read_ahead = 0) {
    disk_ = std::make_shared<DiskCache>(folder_ / "cache", disk_bytes);
    store_->set_script({});
    return std::make_unique<BlockCache>(store_, "x.bin", 1050, disk_, "x", BlockCacheOptions{kBlock, memory_bytes, read_ahead});
  }
  void expect_bytes(BlockCache& cache, std::int64_t begin, std::int64_t count) const {
    std::vector<std::byte> bytes(static_cast<std::size_t>(count));
    cache.read(begin, bytes);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), object_.begin() + begin)) << "bytes from " << begin << " on";
  }

  [[nodiscard]] std::int64_t bytes_on_disk() const {
    std::int64_t bytes = 0;
    for (const auto& file : std::filesystem::directory_iterator(folder_ / "cache" / "x")) {
      bytes += static_cast<std::int64_t>(file.file_size());
    }
    return bytes;
  }

  TestFolder folder_;
  std::vector<std::byte> object_ = random_bytes(1050);
  std::shared_ptr<ScriptedStore> store_ = std::make_shared<ScriptedStore>(std::make_shared<FolderStore>(folder_ / "store"));
  std::shared_ptr<DiskCache> disk_;
};

TEST_F(Caches, GiveTheBytesOfTheObjectWhereverTheyBegin) {
  const auto cache = open(300);
  for (const std::int64_t begin : {0, 1, 99, 100, 450, 949, 1000, 1049, 1050}) {
    for (const std::int64_t count : {0, 1, 99, 100, 101, 350, 1050}) {
      if (begin + count <= 1050) expect_bytes(*cache, begin, count);
    }
  }
  std::vector<std::byte> beyond(2);
  EXPECT_THROW(cache->read(1049, beyond), ContractError);
  EXPECT_THROW(cache->read(-1, beyond), ContractError);
}

TEST_F(Caches, AskMemoryThenDiskThenStore) {
  auto cache = open(300);
  expect_bytes(*cache, 0, 200);
  expect_bytes(*cache, 50, 100);

  BlockCacheCounts counts = cache->counts();
  EXPECT_EQ(counts.memory_misses, 2);
  EXPECT_EQ(counts.memory_hits, 2);
  EXPECT_EQ(counts.memory_bytes, 300);
  EXPECT_EQ(counts.fetches, 2);
  EXPECT_EQ(counts.fetched_bytes, 200);
  EXPECT_EQ(counts.disk.misses, 2);
  EXPECT_EQ(store_->counts().downloads, 2);

  cache = open(300);  // another process, the same folder
  expect_bytes(*cache, 0, 300);

  counts = cache->counts();
  EXPECT_EQ(counts.disk.hits, 2);
  EXPECT_EQ(counts.disk.hit_bytes, 200);
  EXPECT_EQ(counts.disk.misses, 1);
  EXPECT_EQ(store_->counts().downloads, 1) << "only what was not read before";
}

TEST_F(Caches, KeepToTheirCapacityAndDropWhatWasNotUsedForLongest) {
  const auto cache = open(250, 4 * (kBlock + kHeader));
  for (const std::int64_t block : {0, 1, 0, 2, 0, 3, 0, 4, 0, 5}) expect_bytes(*cache, block * kBlock, 1);

  const BlockCacheCounts counts = cache->counts();
  EXPECT_EQ(counts.memory_hits, 4) << "block 0 is always the one used last but one";
  EXPECT_EQ(counts.memory_evictions, 4);
  EXPECT_EQ(counts.held_bytes, 200);
  EXPECT_EQ(counts.most_held_bytes, 200);
  EXPECT_EQ(counts.disk.held_bytes, 4 * (kBlock + kHeader));
  EXPECT_EQ(counts.disk.evictions, 2);
  EXPECT_EQ(bytes_on_disk(), counts.disk.held_bytes);

  // A smaller capacity holds for what older processes left, too.
  EXPECT_EQ(open(250, 2 * (kBlock + kHeader))->counts().disk.held_bytes, 2 * (kBlock + kHeader));
}

TEST_F(Caches, HoldWhatFitsExactly) {
  const auto cache = open(2 * kBlock);
  for (const std::int64_t block : {0, 1, 0, 1}) expect_bytes(*cache, block * kBlock, kBlock);

  EXPECT_EQ(cache->counts().memory_evictions, 0);
  EXPECT_EQ(cache->counts().memory_hits, 2);
}

TEST_F(Caches, DropByTheOrderOfUseOfEarlierProcesses) {
  expect_bytes(*open(kBlock), 0, 300);
  const auto set_time = [&](int block, std::time_t seconds) {
    const timespec times[2] = {{seconds, 0}, {seconds, 0}};
    const auto file = folder_ / fmt::format("cache/x/{:08}-100.block", block);
    ASSERT_EQ(::utimensat(AT_FDCWD, file.c_str(), times, 0), 0) << file;
  };
  set_time(0, 3000);
  set_time(1, 1000);
  set_time(2, 2000);

  const auto cache = open(kBlock, 2 * (kBlock + kHeader));

  EXPECT_TRUE(disk_->get("x/00000000-100"));
  EXPECT_FALSE(disk_->get("x/00000001-100"));
  EXPECT_TRUE(disk_->get("x/00000002-100"));
}

TEST_F(Caches, FetchABlockOnceWhenManyThreadsAskForIt) {
  const auto cache = open(1 << 20);
  // The fetch lasts until all others wait for it.
  store_->set_script({.latency_seconds = 1, .sleep = [&](double) { wait_until([&] { return cache->counts().joined == 7; }); }});
  std::vector<std::jthread> threads;
  for (int t = 0; t < 8; ++t) threads.emplace_back([&] { expect_bytes(*cache, 510, 80); });
  threads.clear();

  EXPECT_EQ(store_->counts().downloads, 1);
  EXPECT_EQ(cache->counts().fetches, 1);
}

TEST_F(Caches, AreRightUnderManyThreadsAndEvictions) {
  auto cache = open(300, 5 * (kBlock + kHeader), 2);
  std::vector<std::jthread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      CounterRng rng(t, "reads");
      for (int i = 0; i < 200; ++i) {
        const auto begin = static_cast<std::int64_t>(rng.next_below(1000));
        expect_bytes(*cache, begin, static_cast<std::int64_t>(rng.next_below(50)));
      }
      for (std::int64_t begin = 0; begin < 1000; begin += 50) expect_bytes(*cache, begin, 50);
    });
  }
  threads.clear();

  const BlockCacheCounts counts = cache->counts();
  EXPECT_LE(counts.most_held_bytes, 300);
  EXPECT_LE(counts.disk.held_bytes, 5 * (kBlock + kHeader));
  EXPECT_GT(counts.disk.hits, 0);
  cache.reset();  // nothing is fetched ahead any more
  EXPECT_EQ(bytes_on_disk(), disk_->counts().held_bytes);
}

TEST_F(Caches, ReadAheadWhereBlocksAreReadInOrder) {
  const auto cache = open(500, 1 << 20, 2);
  expect_bytes(*cache, 500, 1);
  expect_bytes(*cache, 100, 1);
  EXPECT_EQ(cache->counts().read_ahead, 0) << "not in order";
  expect_bytes(*cache, 200, 1);
  wait_until([&] { return cache->counts().read_ahead == 2; });

  store_->set_script(kDown);
  expect_bytes(*cache, 300, 200);

  EXPECT_EQ(cache->counts().memory_hits, 2);
}

TEST_F(Caches, SayWhatTheStoreSaysAndGoOnWithWhatTheyHave) {
  const auto cache = open(300);
  expect_bytes(*cache, 0, 300);
  store_->set_script(kDown);

  EXPECT_SAYS(message_of<StoreError>([&] { expect_bytes(*cache, 500, 10); }), "x.bin");
  expect_bytes(*cache, 0, 300);
  EXPECT_EQ(cache->counts().failures, 1);

  store_->set_script({});
  expect_bytes(*cache, 500, 10);
}

TEST_F(Caches, AFailedReadAheadIsAskedForAgain) {
  const auto cache = open(500, 1 << 20, 1);
  expect_bytes(*cache, 100, 1);
  expect_bytes(*cache, 0, 1);
  // Block 2 is fetched ahead; that breaks off when its reader waits for it.
  store_->set_script({.broken_download = StoreScript::Break{0, 10}, .latency_seconds = 1, .sleep = [&](double) {
                        wait_until([&] { return cache->counts().joined == 1; });
                      }});
  expect_bytes(*cache, 100, 1);
  wait_until([&] { return store_->counts().operations == 1; });

  expect_bytes(*cache, 200, 1);

  EXPECT_EQ(cache->counts().failures, 1);
  EXPECT_EQ(cache->counts().joined, 1);
}

TEST_F(Caches, ADamagedFileIsFetchedAgain) {
  expect_bytes(*open(300), 0, 300);
  const auto file = [&](int block) { return folder_ / fmt::format("cache/x/{:08}-100.block", block); };
  std::string altered = TestFolder::read(file(0));
  altered[60] = static_cast<char>(altered[60] ^ 1);
  folder_.write("cache/x/00000000-100.block", altered);
  std::filesystem::resize_file(file(1), 70);
  std::filesystem::resize_file(file(2), 0);

  const auto cache = open(300);
  expect_bytes(*cache, 0, 300);

  EXPECT_EQ(cache->counts().disk.damaged, 3);
  EXPECT_EQ(store_->counts().downloads, 3);
  EXPECT_TRUE(disk_->get("x/00000000-100")) << "it is kept again";
}

/// Whole in itself, but under the name of another: the last block of the object, which is shorter.
TEST_F(Caches, AFileOfAnotherLengthIsFetchedAgain) {
  expect_bytes(*open(300), 1000, 50);
  std::filesystem::rename(folder_ / "cache/x/00000010-100.block", folder_ / "cache/x/00000001-100.block");

  const auto cache = open(300);
  expect_bytes(*cache, 100, 100);

  EXPECT_EQ(store_->counts().downloads, 1);
}

/// A request beyond the end is one that a store refuses, and may count, charge or retry.
TEST_F(Caches, AskForNothingBehindTheEnd) {
  for (int round = 0; round < 20; ++round) {
    std::filesystem::remove_all(folder_ / "cache");
    const auto cache = open(1 << 20, 1 << 20, 3);
    for (std::int64_t begin = 0; begin < 1050; begin += 50) {
      expect_bytes(*cache, begin, 50);
      // Long enough for what is fetched ahead to be asked for in some round.
      for (int i = 0; i < 20; ++i) std::this_thread::yield();
    }
    EXPECT_EQ(cache->counts().failures, 0);
    EXPECT_LE(store_->counts().operations, 11);
  }
}

/// What would be fetched ahead could only take the place of the block that is being read.
TEST_F(Caches, ReadNothingAheadWithRoomForOneBlock) {
  for (int round = 0; round < 50; ++round) {
    const auto cache = open(kBlock, 1 << 20, 2);
    expect_bytes(*cache, 0, 2 * kBlock);
    // Long enough for a thread to be seen at work in some round, if there is one.
    for (int i = 0; i < 200; ++i) std::this_thread::yield();
    EXPECT_EQ(cache->counts().read_ahead, 0);
  }
}

TEST_F(Caches, AFullDiskIsNoReasonToStop) {
  const auto cache = open(300);
  {
    const FileSizeLimit full(50);
    expect_bytes(*cache, 0, 300);
  }
  EXPECT_EQ(cache->counts().disk.refused, 3);
  EXPECT_EQ(cache->counts().disk.held_bytes, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "cache" / "x")) << "a part of a file is left";
}

TEST_F(Caches, RefuseAFolderThatCannotBeWritten) {
  folder_.write("file", "");
  EXPECT_SAYS(message_of<IoError>([&] { DiskCache cache(folder_ / "file" / "sub", 100); }),
              "cannot write to the folder for cached data, " + (folder_ / "file/sub").string() + ": Not a directory");
  EXPECT_SAYS(message_of<InputError>([&] { (void)open(99); }), "it must hold a block of 100 at least");
}

}  // namespace
}  // namespace tandem

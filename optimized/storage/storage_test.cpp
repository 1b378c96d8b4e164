// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include <fmt/format.h>

#include "core/io/test_folder.h"
#include "optimized/storage/folder_store.h"
#include "optimized/storage/scripted_store.h"
#include "optimized/storage/store_key.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }
std::string text_of(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::vector<std::string> keys_of(const std::vector<ObjectInfo>& objects) {
  std::vector<std::string> keys;
  for (const ObjectInfo& info : objects) keys.push_back(info.key);
  return keys;
}

using Keys = std::vector<std::string>;

TEST(StoreKey, RefusesWhatAFolderOrS3WouldReadInAnotherWay) {
  for (const char* key : {"a", "a/b", "step-00000001/shard.safetensors", ".a/..b", "Größe 1/x=y&z+%"}) {
    EXPECT_EQ(fault_of_key(key), "") << key;
  }
  for (const std::string& key :
       {std::string(), std::string("/a"), std::string("a/"), std::string("a//b"), std::string("../a"), std::string("a/./b"),
        std::string("a/.."), std::string("a\nb"), std::string("a\0b", 3), std::string("\xff"), std::string(901, 'a')}) {
    EXPECT_NE(fault_of_key(key), "") << key;
    EXPECT_THROW(check_key(key), ContractError) << key;
  }
  for (const char* prefix : {"", "a", "a/", "a/b", "step-", "a."}) EXPECT_NO_THROW(check_key_prefix(prefix)) << prefix;
  for (const char* prefix : {"/", "/a", "a//", "../b", "a/../b"}) EXPECT_THROW(check_key_prefix(prefix), ContractError) << prefix;
}

TEST(OpenStore, TakesFoldersAndRefusesWhatIsNoStoreInOneLine) {
  const TestFolder folder;
  StoreAccess access;
  access.access_key = access.secret_key = "x";
  EXPECT_EQ(open_store(folder.path().string(), {})->describe(), "the folder " + folder.path().string());
  EXPECT_EQ(open_store("file://" + folder.path().string() + "/a%20b", {})->describe(), "the folder " + (folder / "a b").string());
  for (const char* url : {"", "gs://bucket", "file://host/path", "file:///a%2", "file:///a%zz", "s3://", "s3://ab",
                          "s3://bu cket", "s3://bucket/../a", "s3://bucket/a//b"}) {
    const std::string message = message_of<InputError>([&] { (void)open_store(url, access); });
    EXPECT_NE(message, "") << url;
    EXPECT_EQ(message.find('\n'), std::string::npos) << url;
  }
  EXPECT_FALSE(fs::exists(folder / "a b")) << "a folder is made when it is first written to";
}

class FolderStoreTest : public ::testing::Test {
 protected:
  TestFolder folder;
  fs::path root = folder / "store";
  FolderStore store{root};

  std::size_t num_unfinished() const {
    const fs::path unfinished = root / ".unfinished";
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(unfinished), {}));
  }
};

TEST_F(FolderStoreTest, GivesBackWhatWasPut) {
  EXPECT_TRUE(store.list("").empty());
  EXPECT_FALSE(store.find("a/b"));
  store.put("a/b", bytes_of("one"));
  store.put("a/b", bytes_of("two and more"));
  store.put("empty", {});
  const fs::path file = folder.write("input", "from a file");
  store.put_file("a/c d/e", file);
  EXPECT_EQ(text_of(store.get("a/b")), "two and more");
  EXPECT_EQ(text_of(store.get_range("a/b", {4, 7})), "and");
  EXPECT_TRUE(store.get_range("a/b", {12, 12}).empty());
  EXPECT_TRUE(store.get("empty").empty());
  EXPECT_EQ(store.find("a/c d/e")->bytes, 11);
  store.get_file("a/c d/e", folder / "output");
  EXPECT_EQ(TestFolder::read(folder / "output"), "from a file");
  EXPECT_EQ(num_unfinished(), 0U);
  store.remove("a/c d/e");
  store.remove("a/c d/e");
  EXPECT_EQ(keys_of(store.list("")), (Keys{"a/b", "empty"}));
  EXPECT_FALSE(fs::exists(root / "a/c d"));
}

TEST_F(FolderStoreTest, ListsKeysByPrefixInOrder) {
  for (const char* key : {"b/1", "a-2", "a/10", "a/1/x", "c"}) store.put(key, bytes_of(key));
  EXPECT_EQ(keys_of(store.list("")), (Keys{"a-2", "a/1/x", "a/10", "b/1", "c"}));
  EXPECT_EQ(keys_of(store.list("a")), (Keys{"a-2", "a/1/x", "a/10"}));
  EXPECT_EQ(keys_of(store.list("a/")), (Keys{"a/1/x", "a/10"}));
  EXPECT_EQ(keys_of(store.list("a/1")), (Keys{"a/1/x", "a/10"}));
  EXPECT_TRUE(store.list("a/1/x/").empty());
  EXPECT_TRUE(store.list("d/").empty());
  EXPECT_THROW(store.put("a/1", bytes_of("x")), StoreError) << "a folder has no place for both";
  EXPECT_THROW(store.put("c/1", bytes_of("x")), StoreError);
  EXPECT_EQ(num_unfinished(), 0U);
}

TEST_F(FolderStoreTest, SaysWhatIsMissingOrOutOfRange) {
  store.put("a", bytes_of("0123"));
  const std::string missing = message_of<InputError>([&] { (void)store.get("b"); });
  EXPECT_NE(missing.find("'b'"), std::string::npos) << missing;
  EXPECT_THROW((void)store.get_range("b", {0, 1}), InputError);
  EXPECT_THROW(store.get_file("b", folder / "x"), InputError);
  EXPECT_THROW((void)store.get_range("a", {2, 5}), InputError);
  EXPECT_THROW((void)store.get_range("a", {3, 2}), ContractError);
  EXPECT_THROW(store.put_file("c", folder / "nothing"), InputError);
  EXPECT_THROW(store.put(".unfinished/a", {}), ContractError);
  EXPECT_THROW(store.put("../a", {}), ContractError);
  EXPECT_FALSE(fs::exists(folder / "x"));
  const fs::path taken = folder.write("taken", "mine");
  EXPECT_THROW(store.get_file("a", taken), IoError);
  EXPECT_EQ(TestFolder::read(taken), "mine") << "the file to read into must be new";
}

TEST_F(FolderStoreTest, LetsOneOfManyWritersWin) {
  constexpr int kWriters = 8;
  std::atomic<int> winners{0}, winner{-1};
  {
    std::vector<std::jthread> writers;
    for (int i = 0; i < kWriters; ++i) {
      writers.emplace_back([&, i] {
        if (store.put_if_absent("lock/owner", bytes_of(fmt::format("writer {}", i)))) {
          ++winners;
          winner = i;
        }
      });
    }
  }
  EXPECT_EQ(winners, 1);
  EXPECT_EQ(text_of(store.get("lock/owner")), fmt::format("writer {}", winner.load()));
  EXPECT_EQ(num_unfinished(), 0U);
}

TEST_F(FolderStoreTest, LeavesNothingOfAWriteThatFails) {
  store.put("a", bytes_of("old"));
  const std::string big(1 << 16, 'x');
  const fs::path file = folder.write("input", big);
  {
    const FileSizeLimit full_disk(1 << 10);
    EXPECT_THROW(store.put("a", bytes_of(big)), StoreError);
    EXPECT_THROW((void)store.put_if_absent("b", bytes_of(big)), StoreError);
    EXPECT_THROW(store.put_file("c", file), StoreError);
  }
  store.put("big", bytes_of(big));
  {
    const FileSizeLimit full_disk(1 << 10);
    EXPECT_THROW(store.get_file("big", folder / "output"), IoError);
  }
  EXPECT_EQ(text_of(store.get("a")), "old");
  EXPECT_EQ(keys_of(store.list("")), (Keys{"a", "big"}));
  EXPECT_EQ(num_unfinished(), 0U);
  EXPECT_FALSE(fs::exists(folder / "output"));
}

TEST_F(FolderStoreTest, KeepsFoldersThatOthersWriteInto) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const std::string key = fmt::format("shared/deep/{}", i);
      for (int round = 0; round < 20; ++round) {
        store.put(key, bytes_of("x"));
        store.remove(key);
      }
      store.put(key, bytes_of(key));
    });
  }
  threads.clear();
  EXPECT_EQ(keys_of(store.list("shared/")), (Keys{"shared/deep/0", "shared/deep/1", "shared/deep/2", "shared/deep/3"}));
}

class ScriptedStoreTest : public ::testing::Test {
 protected:
  TestFolder folder;
  ScriptedStore store{std::make_shared<FolderStore>(folder / "store")};
  double slept_seconds = 0;
  StoreScript script{.sleep = [this](double seconds) { slept_seconds += seconds; }};
};

TEST_F(ScriptedStoreTest, IsDownForTheOperationsOfItsScript) {
  script.down = {1, 3};
  store.set_script(script);
  store.put("a", bytes_of("one"));
  EXPECT_THROW(store.put("a", bytes_of("two")), StoreError);
  EXPECT_THROW((void)store.list(""), StoreError);
  EXPECT_EQ(text_of(store.get("a")), "one");
  EXPECT_EQ(store.counts().operations, 4);
  EXPECT_EQ(store.counts().uploads, 1) << "one that finds the store down uploads nothing";
  store.set_script({.down = {0, StoreScript::kForEver}});
  EXPECT_THROW((void)store.find("a"), StoreError);
  EXPECT_THROW(store.remove("a"), StoreError);
  EXPECT_THROW((void)store.put_if_absent("b", {}), StoreError);
  EXPECT_TRUE(store.behind().find("a"));
}

TEST_F(ScriptedStoreTest, BreaksTransfersOffAndLeavesNothing) {
  const fs::path file = folder.write("input", "0123456789");
  script.broken_upload = {.index = 1, .byte = 4};
  script.broken_download = {.index = 0, .byte = 6};
  store.set_script(script);
  store.put_file("a", file);
  EXPECT_THROW(store.put_file("b", file), StoreError);
  store.put_file("c", file);
  EXPECT_THROW(store.get_file("a", folder / "output"), StoreError);
  EXPECT_FALSE(fs::exists(folder / "output"));
  store.get_file("a", folder / "output");
  EXPECT_EQ(keys_of(store.list("")), (Keys{"a", "c"}));
  EXPECT_EQ(store.counts().uploaded_bytes, 24);
  EXPECT_EQ(store.counts().downloaded_bytes, 16);
}

TEST_F(ScriptedStoreTest, TakesTheTimeOfItsLink) {
  script.latency_seconds = 0.5;
  script.bytes_per_second = 4;
  store.set_script(script);
  store.put("a", bytes_of("01234567"));
  EXPECT_DOUBLE_EQ(slept_seconds, 2.5);
  (void)store.get_range("a", {1, 3});
  EXPECT_DOUBLE_EQ(slept_seconds, 3.5);
  (void)store.find("a");
  EXPECT_DOUBLE_EQ(slept_seconds, 4);
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/remote_tokens.h"

#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/io/hash.h"
#include "core/io/test_folder.h"
#include "core/rng.h"
#include "optimized/data_pipeline/manifest.h"
#include "optimized/data_pipeline/prepare.h"
#include "optimized/storage/folder_store.h"
#include "optimized/storage/scripted_store.h"

namespace tandem {
namespace {

using namespace std::string_literals;

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << "says: " << (message)

constexpr std::int64_t kBlock = 100;
const StoreScript kDown = {.down = {0, StoreScript::kForEver}};

/// Prepared data, and the same in a store.
class Remote : public testing::Test {
 protected:
  Remote() {
    CounterRng rng(5, "text");
    std::string text;
    for (int i = 0; i < 300; ++i) text += std::string(rng.next_below(40), static_cast<char>('a' + i % 26)) + "\n";
    std::filesystem::create_directory(folder_ / "store");
    prepare_data({folder_.write("text", text)}, "bytes", folder_ / "store/p", DocumentRule::line);
  }
  [[nodiscard]] RemoteTokens open() { return {store_, "p", {folder_ / "cache", 1 << 20, {kBlock, 1000, 0}}}; }

  TestFolder folder_;
  std::shared_ptr<ScriptedStore> store_ = std::make_shared<ScriptedStore>(std::make_shared<FolderStore>(folder_ / "store"));
};

TEST_F(Remote, TokensAreThoseOfTheDataOnThisMachine) {
  const PreparedTokens local(folder_ / "store/p");
  const RemoteTokens remote = open();

  ASSERT_EQ(remote.num_tokens(), local.num_tokens());
  ASSERT_EQ(remote.num_documents(), local.num_documents());
  EXPECT_EQ(remote.vocabulary(), local.vocabulary());
  EXPECT_EQ(remote.identity(), local.identity());
  for (std::int64_t d = 0; d <= local.num_documents(); ++d) EXPECT_EQ(remote.document_begin(d), local.document_begin(d));
  std::vector<std::int32_t> expected(static_cast<std::size_t>(local.num_tokens()));
  std::vector<std::int32_t> tokens = expected;
  local.read(0, expected);
  remote.read(0, tokens);
  EXPECT_EQ(tokens, expected);
  EXPECT_EQ(tokenizer_of(*store_, "p")->name(), "bytes");
  EXPECT_SAYS(describe(remote.cache_counts()), "cache: memory  0 of ");
}

TEST_F(Remote, ASecondRunFetchesNothingButTheDescription) {
  std::vector<std::int32_t> tokens(1000);
  open().read(0, tokens);
  store_->set_script({});

  const RemoteTokens again = open();
  again.read(0, tokens);

  EXPECT_EQ(store_->counts().downloads, 1) << "p.json";
  EXPECT_EQ(again.cache_counts().fetches, 0);
}

TEST_F(Remote, CachedTokensAreThereWithoutTheStore) {
  std::vector<std::int32_t> tokens(kBlock);
  std::vector<std::int32_t> same(kBlock);
  open().read(0, tokens);
  store_->set_script(kDown);

  const RemoteTokens remote = open();
  remote.read(0, same);

  EXPECT_EQ(same, tokens);
  EXPECT_SAYS(remote.describe(), "the store was not reached");
  EXPECT_THROW(remote.read(2000, same), StoreError);
}

TEST_F(Remote, ADamagedCopyOfTheIndexIsFetchedAgain) {
  const PreparedTokens local(folder_ / "store/p");
  (void)open();
  int damaged = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder_ / "cache")) {
    if (file.path().extension() != ".idx") continue;
    std::string bytes = TestFolder::read(file.path());
    ++bytes[static_cast<std::size_t>(34 + 4 * local.num_documents() + 8)];  // where the second sequence starts
    std::ofstream(file.path(), std::ios::binary) << bytes;
    ++damaged;
  }
  ASSERT_EQ(damaged, 1);

  EXPECT_EQ(open().document_begin(1), local.document_begin(1));
  store_->set_script(kDown);
  EXPECT_EQ(open().document_begin(1), local.document_begin(1)) << "the good one is kept";
}

/// A store of 6 GiB, all but a few bytes of which are a hole.
TEST_F(Remote, TokensBeyond4GiBAreFetchedFromTheirPlace) {
  constexpr std::int64_t kTokens = std::int64_t{3} << 30, kSequences = 3;
  std::string idx = "MMIDIDX\0\0"s;
  const auto add = [&](auto value) { idx.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  add(std::uint64_t{1});
  add(std::uint8_t{8});  // u16
  add(std::uint64_t{kSequences});
  add(std::uint64_t{2});
  for (std::int64_t i = 0; i < kSequences; ++i) add(static_cast<std::int32_t>(kTokens / kSequences));
  for (std::int64_t i = 0; i < kSequences; ++i) add(std::int64_t{2} * i * (kTokens / kSequences));
  for (const std::int64_t sequence : {std::int64_t{0}, kSequences}) add(sequence);
  const auto bin = folder_.write("store/p.bin", "");
  std::filesystem::resize_file(bin, 2 * kTokens);
  std::fstream(bin, std::ios::in | std::ios::out | std::ios::binary).seekp(5'000'000'000).write("\7\1", 2);
  folder_.write("store/p.idx", idx);
  DataManifest manifest{"other", 1000, 0, "file", 1, kTokens, {1, 2}};
  manifest.idx_hash = hash128(std::as_bytes(std::span(idx)));
  folder_.write("store/p.json", to_json(manifest));
  std::vector<std::int32_t> tokens(3);

  open().read(2'500'000'000 - 1, tokens);

  EXPECT_EQ(tokens, (std::vector<std::int32_t>{0, 0x107, 0}));
}

TEST_F(Remote, OtherDataOfTheSameNameIsNotTakenForIt) {
  std::vector<std::int32_t> tokens(3);
  open().read(0, tokens);
  prepare_data({folder_.write("other", "xyz")}, "bytes", folder_ / "store/p");

  const RemoteTokens remote = open();
  remote.read(0, tokens);

  EXPECT_EQ(tokens, (std::vector<std::int32_t>{'x', 'y', 'z'}));
}

TEST_F(Remote, DamageIsOneClearLine) {
  const auto refusal = [&] { return message_of<InputError>([&] { (void)open(); }); };
  const std::string idx = TestFolder::read(folder_ / "store/p.idx");
  std::string altered = idx;
  altered[500] = static_cast<char>(altered[500] ^ 1);

  folder_.write("store/p.idx", altered);
  EXPECT_SAYS(refusal(), "bytes that are not those which p.json describes");
  folder_.write("store/p.idx", idx);
  std::filesystem::resize_file(folder_ / "store/p.bin", 70);
  EXPECT_SAYS(refusal(), "has 70 bytes, by its .json it should have ");
  std::filesystem::remove(folder_ / "store/p.bin");
  EXPECT_SAYS(refusal(), "p.bin of ");
  folder_.write("store/p.json", to_json({"bytes", 256, 0, "file", 1, 3, {1, 2}}));
  EXPECT_SAYS(refusal(), "has no hash of its index (idx_xxh3_128); prepare the data again");
  std::filesystem::remove(folder_ / "store/p.json");
  EXPECT_FALSE(refusal().empty());
}

TEST(RemoteData, IsNamedByAnUrl) {
  EXPECT_FALSE(parse_remote_data("data/p"));
  EXPECT_EQ(parse_remote_data("s3://bucket/a/p")->store, "s3://bucket/a");
  EXPECT_EQ(parse_remote_data("s3://bucket/p")->name, "p");
  EXPECT_EQ(parse_remote_data("file:///a/b/p")->store, "file:///a/b");
  EXPECT_SAYS(message_of<InputError>([] { (void)parse_remote_data("s3://bucket"); }),
              "s3://bucket names no data: s3://BUCKET/PREFIX");
  EXPECT_SAYS(message_of<InputError>([] { (void)parse_remote_data("file:///a/"); }), "file:///FOLDER/PREFIX is needed");
}

}  // namespace
}  // namespace tandem

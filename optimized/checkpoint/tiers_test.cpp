// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/tiers.h"

#include <gtest/gtest.h>

#include <span>

#include <fmt/format.h>

#include "core/io/file_operations.h"
#include "core/io/hash.h"
#include "core/io/safetensors.h"
#include "core/io/test_folder.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/storage/folder_store.h"
#include "optimized/storage/scripted_store.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Steps = std::vector<std::int64_t>;

// Two tensors of two numbers each, one in each of two files.
fs::path write_step(const fs::path& folder, std::int64_t step, float value) {
  const fs::path step_folder = folder / step_folder_name(step);
  fs::remove_all(step_folder);
  fs::create_directories(step_folder);
  CheckpointManifest manifest;
  manifest.info.next_step = step;
  manifest.info.data = "synthetic";
  manifest.libraries["tandem"] = "test";
  for (int i = 0; i < 2; ++i) {
    const std::string name = i == 0 ? "wte.weight" : "wpe.weight";
    float values[2] = {value, static_cast<float>(i)};
    const std::vector<NamedTensor> tensors = {{name, TensorView(values, DType::f32, {2, 1})}};
    const std::string file = fmt::format("shard-{:05}.safetensors", i);
    write_safetensors(step_folder / file, tensors);
    const std::string bytes = TestFolder::read(step_folder / file);
    manifest.files.push_back({file, static_cast<std::int64_t>(bytes.size()), hash128(std::as_bytes(std::span(bytes)))});
    manifest.tensors.push_back({name, {2, 1}, DType::f32, {{static_cast<std::size_t>(i), whole(name, {2, 1}, DType::f32)}}});
  }
  const std::string text = to_json(manifest);
  replace_file(system_files(), step_folder / kManifestName, std::as_bytes(std::span(text)));
  return step_folder;
}

std::string text_of(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

void overwrite(const fs::path& file, std::string_view text) {
  const std::string old = TestFolder::read(file);
  std::ofstream(file, std::ios::binary) << old.substr(0, old.size() - text.size()) << text;
}

// The system's, but nothing is made durable: these tests end no machine, and a flush takes longer than all else.
class HastyFiles final : public WrappedFiles {
 public:
  void sync(int, const fs::path&) override {}
  void sync_folder(const fs::path&) override {}
};

class TiersTest : public ::testing::Test {
 protected:
  TestFolder folder;
  fs::path local = folder / "local";      // of the run that writes
  fs::path fetched = folder / "fetched";  // of the run that reads
  HastyFiles files;
  std::shared_ptr<FolderStore> behind = std::make_shared<FolderStore>(folder / "store", files);
  ScriptedStore store{behind};
  std::vector<std::string> notes;
  std::function<void(const std::string&)> note = [this](const std::string& line) { notes.push_back(line); };

  void SetUp() override { fs::create_directories(local); }

  // Whoever reads the store at this moment finds whole checkpoints only.
  void expect_store_is_sound(const std::string& when) {
    for (const std::int64_t step : list_remote_checkpoints(*behind)) {
      const std::string name = step_folder_name(step);
      const CheckpointManifest manifest = parse_manifest(text_of(behind->get(name + "/manifest.json")), name);
      for (const CheckpointFile& file : manifest.files) {
        const std::string key = name + "/" + file.name;
        ASSERT_TRUE(behind->find(key)) << when << ": " << key;
        EXPECT_EQ(to_hex(hash128(behind->get(key))), to_hex(file.hash)) << when << ": " << key;
      }
    }
  }
  // Runs `work` with the store going down at each of its operations in turn, for one operation or for ever, and then once more
  // with the store up. `undo` brings back what was before; `check` looks at what is left.
  template <class Undo, class Work, class Check>
  void fail_everywhere(const Undo& undo, const Work& work, const Check& check) {
    undo();
    store.set_script({});
    work();
    const std::int64_t num_operations = store.counts().operations;
    ASSERT_GT(num_operations, 2);
    for (std::int64_t k = 0; k < num_operations; ++k) {
      for (const std::int64_t end : {k + 1, StoreScript::kForEver}) {
        const std::string when = fmt::format("down from operation {} of {}, until {}", k, num_operations, end);
        undo();
        store.set_script({.down = {k, end}});
        EXPECT_THROW(work(), StoreError) << when;
        check(when);
        store.set_script({});
        EXPECT_NO_THROW(work()) << when;
      }
    }
  }
};

TEST_F(TiersTest, BringsBackWhatWasPublished) {
  const fs::path step = write_step(local, 120, 1);
  upload_checkpoint(store, step);
  EXPECT_EQ(list_remote_checkpoints(store), (Steps{120}));
  EXPECT_EQ(text_of(store.get("latest")), "step-00000120\n");
  const fs::path copy = fetch_checkpoint(store, 120, fetched / "deep");
  EXPECT_EQ(copy, fetched / "deep/step-00000120");
  for (const auto& entry : fs::directory_iterator(step)) {
    EXPECT_EQ(TestFolder::read(copy / entry.path().filename()), TestFolder::read(entry.path())) << entry.path();
  }
  EXPECT_FALSE(find_damage(copy, VerifyDepth::contents));
}

TEST_F(TiersTest, PublishesOnlyWhatIsThereAndOnlyOnce) {
  const fs::path step = write_step(local, 1, 1);
  upload_checkpoint_file(store, step, "shard-00000.safetensors");
  const std::string message = message_of<StoreError>([&] { publish_remote(store, step); });
  EXPECT_NE(message.find("shard-00001.safetensors is missing"), std::string::npos) << message;
  behind->put("step-00000001/shard-00001.safetensors", std::as_bytes(std::span("short", 5)));
  EXPECT_NE(message_of<StoreError>([&] { publish_remote(store, step); }).find("has 5 bytes"), std::string::npos);
  EXPECT_TRUE(list_remote_checkpoints(store).empty());
  upload_checkpoint(store, step);
  store.set_script({});
  upload_checkpoint(store, step);
  EXPECT_EQ(store.counts().uploads, 0) << "what is there with the same content is not sent again";
  EXPECT_THROW(upload_checkpoint_file(store, local, "x"), ContractError);
}

TEST_F(TiersTest, ReplacesAStepOfAnotherRunAndWhatItHadBeside) {
  upload_checkpoint(store, write_step(local, 1, 1));
  behind->put("step-00000001/shard-00002.safetensors", {});  // that run had three ranks
  upload_checkpoint(store, write_step(local, 1, 2));
  EXPECT_EQ(store.list("step-00000001/").size(), 3U);
  const fs::path copy = fetch_checkpoint(store, 1, fetched);
  EXPECT_EQ(SafetensorsFile(copy / "shard-00000.safetensors").read_as<float>("wte.weight")[0], 2);
}

TEST_F(TiersTest, LatestDoesNotGoBackToAnOlderStep) {
  upload_checkpoint(store, write_step(local, 20, 1));
  upload_checkpoint(store, write_step(local, 10, 1));
  EXPECT_EQ(text_of(store.get("latest")), "step-00000020\n");
  store.remove("step-00000020/manifest.json");
  upload_checkpoint(store, write_step(local, 11, 1));
  EXPECT_EQ(text_of(store.get("latest")), "step-00000011\n") << "the newer one is no checkpoint any more";
}

TEST_F(TiersTest, AStoreThatFailsWhilePublishingHoldsWholeCheckpoints) {
  const fs::path older = write_step(folder / "older", 1, 1);
  const fs::path same_step = write_step(folder / "same", 2, 5);
  const fs::path step = write_step(local, 2, 2);
  for (const bool replaces : {false, true}) {
    const auto undo = [&] {
      fs::remove_all(folder / "store");
      store.set_script({});
      upload_checkpoint(store, older);
      if (replaces) upload_checkpoint(store, same_step);
    };
    fail_everywhere(
        undo, [&] { upload_checkpoint(store, step); },
        [&](const std::string& when) {
          expect_store_is_sound(when);
          EXPECT_TRUE(behind->find("step-00000001/manifest.json")) << when;
        });
    EXPECT_EQ(list_remote_checkpoints(store), (Steps{2, 1}));
    const fs::path copy = fetch_checkpoint(store, 2, folder / fmt::format("copy {}", replaces));
    EXPECT_EQ(SafetensorsFile(copy / "shard-00000.safetensors").read_as<float>("wte.weight")[0], 2);
  }
}

TEST_F(TiersTest, AnUploadThatBreaksOffPublishesNothing) {
  const fs::path step = write_step(local, 2, 2);
  for (std::int64_t upload_index = 0; upload_index < 3; ++upload_index) {
    fs::remove_all(folder / "store");
    store.set_script({.broken_upload = StoreScript::Break{.index = upload_index, .byte = 10}});
    EXPECT_THROW(upload_checkpoint(store, step), StoreError);
    EXPECT_TRUE(list_remote_checkpoints(*behind).empty()) << upload_index;
    upload_checkpoint(store, step);
    expect_store_is_sound("after the second attempt");
  }
}

TEST_F(TiersTest, AStoreThatFailsWhileFetchingLeavesNoStepBehind) {
  upload_checkpoint(store, write_step(local, 7, 1));
  for (const bool has_damaged : {false, true}) {
    const auto undo = [&] {
      fs::remove_all(fetched);
      if (has_damaged) overwrite(write_step(fetched, 7, 1) / "shard-00001.safetensors", "x");
    };
    fail_everywhere(
        undo, [&] { (void)fetch_checkpoint(store, 7, fetched); },
        [&](const std::string& when) {
          EXPECT_EQ(fs::exists(fetched / "step-00000007"), has_damaged) << when;
          EXPECT_EQ(fs::exists(fetched) ? list_checkpoints(fetched).size() : 0U, has_damaged ? 1U : 0U) << when;
          EXPECT_FALSE(fs::exists(fetched / "step-00000007.fetching")) << when;
        });
    EXPECT_FALSE(find_damage(fetched / "step-00000007", VerifyDepth::contents)) << "the last attempt found the store up";
  }
}

TEST_F(TiersTest, RefusesACopyThatDoesNotVerify) {
  upload_checkpoint(store, write_step(local, 7, 1));
  const std::string key = "step-00000007/shard-00001.safetensors";
  std::vector<std::byte> bytes = behind->get(key);
  bytes.back() ^= std::byte{1};
  behind->put(key, bytes);
  const std::string message = message_of<InputError>([&] { (void)fetch_checkpoint(store, 7, fetched); });
  EXPECT_NE(message.find("shard-00001.safetensors"), std::string::npos) << message;
  EXPECT_TRUE(list_checkpoints(fetched).empty());
  EXPECT_THROW((void)fetch_checkpoint(store, 8, fetched), InputError);
  // Another step's checkpoint under this name.
  upload_checkpoint(store, write_step(local, 9, 1));
  for (const ObjectInfo& info : behind->list("step-00000009/")) {
    behind->put("step-00000010" + info.key.substr(13), behind->get(info.key));
  }
  EXPECT_NE(message_of<InputError>([&] { (void)fetch_checkpoint(store, 10, fetched); }).find("step 9"), std::string::npos);
  EXPECT_EQ(fetch_checkpoint(store, 9, fetched).filename(), "step-00000009");
}

TEST_F(TiersTest, KeepsAWholeCopyThatIsThereAndClearsWhatAKilledRunLeft) {
  upload_checkpoint(store, write_step(local, 7, 1));
  fs::create_directories(fetched / "step-00000007.fetching");
  std::ofstream(fetched / "step-00000007.fetching/shard-00000.safetensors") << "half";
  (void)fetch_checkpoint(store, 7, fetched);
  store.set_script({});
  (void)fetch_checkpoint(store, 7, fetched);
  EXPECT_EQ(store.counts().operations, 0);
  EXPECT_FALSE(fs::exists(fetched / "step-00000007.fetching"));
}

TEST_F(TiersTest, PrunesOldStepsManifestsFirst) {
  for (const std::int64_t step : {1, 3, 5, 7}) upload_checkpoint(store, write_step(local, step, 1));
  behind->put("step-00000004/shard-00000.safetensors", {});  // an upload that ended early
  behind->put("step-00000006/shard-00000.safetensors", {});  // or one that still goes on
  behind->put("other/file", {});
  prune_remote(store, 0);
  EXPECT_EQ(list_remote_checkpoints(store), (Steps{7, 5, 3, 1}));
  store.set_script({.down = {4, StoreScript::kForEver}});  // listed, both manifests removed, listed
  EXPECT_THROW(prune_remote(store, 2), StoreError);
  EXPECT_EQ(list_remote_checkpoints(*behind), (Steps{7, 5}));
  EXPECT_EQ(behind->list("step-00000001/").size(), 2U);
  store.set_script({});
  prune_remote(store, 1);
  EXPECT_EQ(list_remote_checkpoints(store), (Steps{7}));
  EXPECT_EQ(store.list("step-").size(), 3U);
  EXPECT_EQ(store.list("").size(), 5U) << "three of step 7, latest, other/file";
  prune_remote(store, 3);
  EXPECT_EQ(list_remote_checkpoints(store), (Steps{7}));
}

TEST_F(TiersTest, KeepsProtectedStepsAndTakesBackWhatIsBeyondAStep) {
  for (const std::int64_t step : {1, 3, 5, 7}) upload_checkpoint(store, write_step(local, step, 1));
  prune_remote(store, 1, {3});
  EXPECT_EQ(list_remote_checkpoints(store), (Steps{7, 3}));
  behind->put("step-00000009/shard-00000.safetensors", {});  // an upload that has not ended
  remove_remote_after(store, 3);
  EXPECT_EQ(list_remote_checkpoints(store), (Steps{3}));
  EXPECT_EQ(store.list("step-").size(), 3U);
}

TEST_F(TiersTest, FindsTheNewestOverBothTiers) {
  write_step(local, 10, 1);
  upload_checkpoint(store, write_step(folder / "other", 20, 1));
  EXPECT_EQ(find_newest_checkpoint(local, nullptr, note), local / "step-00000010");
  EXPECT_EQ(find_newest_checkpoint(local, &store, note), local / "step-00000020") << "fetched, because it is newer";
  EXPECT_TRUE(notes.empty());
  write_step(local, 30, 1);
  EXPECT_EQ(find_newest_checkpoint(local, &store, note), local / "step-00000030");
  overwrite(local / "step-00000030/shard-00000.safetensors", "x");
  EXPECT_EQ(find_newest_checkpoint(local, &store, note), local / "step-00000020");
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("step-00000030"), std::string::npos) << notes[0];
  EXPECT_EQ(find_newest_checkpoint(fetched, &store, note), fetched / "step-00000020") << "a folder that does not exist yet";
}

TEST_F(TiersTest, OfEqualStepsTheLocalOneUnlessItIsDamaged) {
  upload_checkpoint(store, write_step(local, 5, 2));
  write_step(local, 5, 3);
  EXPECT_EQ(find_newest_checkpoint(local, &store, note), local / "step-00000005");
  const fs::path shard = local / "step-00000005/shard-00000.safetensors";
  EXPECT_EQ(SafetensorsFile(shard).read_as<float>("wte.weight")[0], 3);
  overwrite(shard, "x");
  EXPECT_EQ(find_newest_checkpoint(local, &store, note), local / "step-00000005");
  EXPECT_EQ(SafetensorsFile(shard).read_as<float>("wte.weight")[0], 2) << "the store's copy took its place";
  EXPECT_EQ(notes.size(), 1U);
}

TEST_F(TiersTest, AStoreThatIsDownIsANoteWhereTheFolderHasOne) {
  write_step(local, 5, 1);
  upload_checkpoint(store, write_step(folder / "other", 8, 1));
  upload_checkpoint(store, write_step(folder / "other", 9, 1));
  for (const std::int64_t first : {0, 1, 3}) {
    notes.clear();
    store.set_script({.down = {first, StoreScript::kForEver}});
    EXPECT_EQ(find_newest_checkpoint(local, &store, note), local / "step-00000005") << first;
    ASSERT_EQ(notes.size(), 1U) << "it is not asked again: " << first;
    EXPECT_NE(notes[0].find("down"), std::string::npos) << notes[0];
    EXPECT_THROW((void)find_newest_checkpoint(fetched, &store, note), StoreError) << first;
  }
}

TEST_F(TiersTest, SaysWhenNoTierHasOne) {
  EXPECT_NE(message_of<InputError>([&] { (void)find_newest_checkpoint(folder / "nothing", nullptr, note); }).find("nothing"),
            std::string::npos);
  upload_checkpoint(store, write_step(local, 5, 1));
  behind->put("step-00000005/manifest.json", std::as_bytes(std::span("{}", 2)));
  overwrite(local / "step-00000005/shard-00000.safetensors", "x");
  const std::string message = message_of<InputError>([&] { (void)find_newest_checkpoint(local, &store, note); });
  EXPECT_NE(message.find("shard-00000"), std::string::npos) << message;
  EXPECT_NE(message.find("1 more"), std::string::npos) << message;
  EXPECT_EQ(find_newest_checkpoint(write_step(local, 6, 1), &store, note), local / "step-00000006") << "a step that is named";
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// What may have happened to the files of a checkpoint, and the line that says it.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <fstream>

#include "core/io/safetensors.h"
#include "optimized/checkpoint/checkpoint_test_support.h"
#include "optimized/checkpoint/manifest_format.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kShard = "shard-00001.safetensors";

/// An older checkpoint that is whole, and a newer one, of two data ranks, to be damaged.
class CheckpointDamage : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    made_ = new TestFolder;
    save_trained(tiny_config({.data = 2}), made_->path(), 1);
    save_trained(tiny_config({.data = 2}), made_->path(), 2);
  }
  static void TearDownTestSuite() { delete made_; }

  void SetUp() override { fs::copy(made_->path(), folder_.path(), fs::copy_options::recursive); }

  [[nodiscard]] fs::path file(const std::string& name) const { return step_ / name; }
  [[nodiscard]] std::string read(const std::string& name) const { return TestFolder::read(file(name)); }
  void write(const std::string& name, const std::string& bytes) const { folder_.write("step-00000002/" + name, bytes); }
  void flip_bit(const std::string& name, std::size_t byte, unsigned bit = 0) const {
    std::string bytes = read(name);
    bytes.at(byte) = static_cast<char>(static_cast<unsigned char>(bytes[byte]) ^ (1U << bit));
    write(name, bytes);
  }
  /// Text of the manifest with its seal renewed: only the content is wrong.
  void edit_manifest(const std::string& from, const std::string& to) const {
    std::string text = read(kManifestName);
    text = text.substr(0, text.rfind("\"manifest_xxh128\""));
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    write(kManifestName, text + manifest_ending(hash128(std::as_bytes(std::span(text)))));
  }

  [[nodiscard]] std::string damage(VerifyDepth depth = VerifyDepth::contents) const {
    return find_damage(step_, depth).value_or("none");
  }
  void expect_refused(const std::string& words) const {
    EXPECT_NE(damage().find(words), std::string::npos) << damage();
    std::string noted;
    EXPECT_EQ(find_checkpoint(folder_.path(), [&](const std::string& line) { noted += line; }).filename(), "step-00000001");
    EXPECT_NE(noted.find("step-00000002 is passed over: "), std::string::npos) << noted;
    EXPECT_EQ(message_of<InputError>([&] { static_cast<void>(find_checkpoint(step_)); }), damage());
  }

  static TestFolder* made_;
  TestFolder folder_;
  fs::path step_ = folder_.path() / "step-00000002";
};
TestFolder* CheckpointDamage::made_ = nullptr;

TEST_F(CheckpointDamage, IsNotFoundWhereThereIsNone) {
  EXPECT_EQ(damage(), "none");
  EXPECT_EQ(find_checkpoint(folder_.path()), step_);
}

TEST_F(CheckpointDamage, ATruncatedFile) {
  fs::resize_file(file(kShard), fs::file_size(file(kShard)) - 1);
  expect_refused(std::string(kShard) + ": has ");
  expect_refused("truncated");
}

TEST_F(CheckpointDamage, AFileWithMoreBytes) {
  write(kShard, read(kShard) + "x");
  expect_refused("something was appended");
}

TEST_F(CheckpointDamage, AMissingFile) {
  fs::remove(file(kShard));
  expect_refused(std::string(kShard) + ": is missing");
}

TEST_F(CheckpointDamage, ARenamedFile) {
  fs::rename(file(kShard), file("shard-1.safetensors"));
  expect_refused(std::string(kShard) + ": is missing; renamed to 'shard-1.safetensors', which has its size?");
}

TEST_F(CheckpointDamage, TwoFilesWithTheirNamesExchanged) {
  fs::rename(file(kShard), file("other"));
  fs::rename(file("shard-00000.safetensors"), file(kShard));
  fs::rename(file("other"), file("shard-00000.safetensors"));
  expect_refused("shard-0000");
}

TEST_F(CheckpointDamage, AnExtraFile) {
  write("notes.txt", "mine");
  expect_refused("notes.txt: an extra file, which the manifest does not know");
}

TEST_F(CheckpointDamage, OneBitInAnyRegionOfAShard) {
  const std::string bytes = read(kShard);
  const auto header = static_cast<std::size_t>(static_cast<unsigned char>(bytes[0]) + 256 * static_cast<unsigned char>(bytes[1]));
  const std::size_t places[] = {
      0,          7,          bytes.find("h.0.mlp"),           bytes.find("F32"), bytes.find("data_offsets"),
      7 + header, 8 + header, (8 + header + bytes.size()) / 2, bytes.size() - 1};
  for (const std::size_t place : places) {
    for (const unsigned bit : {0U, 5U, 7U}) {
      flip_bit(kShard, place, bit);
      EXPECT_NE(damage().find(std::string(kShard) + ": damaged: its bytes hash to "), std::string::npos) << place << damage();
      flip_bit(kShard, place, bit);
    }
  }
  EXPECT_EQ(damage(), "none");
  flip_bit(kShard, bytes.size() - 1);
  expect_refused("damaged");
}

TEST_F(CheckpointDamage, OneBitAnywhereInTheManifest) {
  const std::size_t size = read(kManifestName).size();
  const std::size_t seal = size - 36;  // the digest and what closes the text
  for (std::size_t place = 0; place < size; place += place < seal ? 61 : 1) {
    flip_bit(kManifestName, place, static_cast<unsigned>(place % 8));
    EXPECT_NE(damage(VerifyDepth::manifest).find(kManifestName), std::string::npos) << place << " " << damage();
    flip_bit(kManifestName, place, static_cast<unsigned>(place % 8));
  }
  EXPECT_EQ(damage(), "none");
}

TEST_F(CheckpointDamage, ATruncatedManifest) {
  const std::string text = read(kManifestName);
  for (const std::size_t size : {std::size_t{0}, text.size() / 2, text.size() - 3, text.size() - 1}) {
    write(kManifestName, text.substr(0, size));
    expect_refused(kManifestName);
  }
  write(kManifestName, text + " ");
  expect_refused("something else than 'manifest_xxh128' ends it");
}

// Longer than the blocks in which files are read: the last block is a part of one.
TEST(CheckpointDamageOfLongFiles, IsFoundInTheirLastByteAndNoneIsWhereThereIsNone) {
  RunConfig config = tiny_config();
  config.model.vocabulary = 60'000;
  const TestFolder folder;
  save_trained(config, folder.path(), 1);
  const fs::path shard = folder / "step-00000001/shard-00000.safetensors";
  ASSERT_GT(fs::file_size(shard), std::uintmax_t{5} << 20);
  EXPECT_EQ(find_damage(folder / "step-00000001", VerifyDepth::contents), std::nullopt);

  std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-1, std::ios::end);
  const auto last = static_cast<char>(file.get() ^ 1);
  file.seekp(-1, std::ios::end);
  file.put(last);
  file.close();
  EXPECT_NE(find_damage(folder / "step-00000001", VerifyDepth::contents), std::nullopt);
}

TEST_F(CheckpointDamage, AManifestThatIsAPipeIsNotWaitedFor) {
  fs::remove(file(kManifestName));
  ASSERT_EQ(::mkfifo(file(kManifestName).c_str(), 0600), 0);
  expect_refused("manifest.json: is no regular file");
}

TEST_F(CheckpointDamage, AManifestWithoutItsHash) {
  std::string text = read(kManifestName);
  text = text.substr(0, text.rfind(",\n\"manifest_xxh128\"")) + "\n}\n";
  write(kManifestName, text);
  expect_refused("field 'manifest_xxh128' is missing");

  const Pitfall planted[] = {Pitfall::missing_hash_accepted};
  EXPECT_EQ(find_damage(step_, VerifyDepth::contents, PitfallSet(planted)), std::nullopt);
}

TEST_F(CheckpointDamage, AFileWithoutItsHash) {
  const std::string hash = to_hex(read_manifest_of(step_).files[1].hash);
  edit_manifest(",\"xxh128\":\"" + hash + "\"", "");
  expect_refused("field 'files[1].xxh128' is missing");

  // Planted: what has no hash is taken as good, whatever is in it.
  flip_bit(kShard, read(kShard).size() - 1);
  const Pitfall planted[] = {Pitfall::missing_hash_accepted};
  EXPECT_EQ(find_damage(step_, VerifyDepth::contents, PitfallSet(planted)), std::nullopt);
  EXPECT_EQ(find_checkpoint(folder_.path(), {}, PitfallSet(planted)), step_);
  EXPECT_EQ(read_checkpoint_info(step_, PitfallSet(planted)).next_step, 2);
}

TEST_F(CheckpointDamage, AnotherStepsManifest) {
  fs::copy_file(made_->path() / "step-00000001" / kManifestName, file(kManifestName), fs::copy_options::overwrite_existing);
  expect_refused("the manifest is of step 1");
}

TEST_F(CheckpointDamage, AnotherFormatOrVersion) {
  edit_manifest("\"version\": 2", "\"version\": 3");
  expect_refused("field 'version' is 3, this program reads version 2");
  edit_manifest("tandem-checkpoint", "somebody-else");
  expect_refused("field 'format' is 'somebody-else', not 'tandem-checkpoint'");
}

TEST_F(CheckpointDamage, ACheckpointOfFormat1) {
  fs::remove_all(step_);
  fs::create_directory(step_);
  write("state.json", R"({"format": "tandem-checkpoint-1"})");
  expect_refused("state.json: a checkpoint of format 1, this program reads format 2");
  fs::remove(file("state.json"));
  write(kManifestName, R"({"format": "tandem-checkpoint-1"})");
  expect_refused("a checkpoint of format 1");
}

TEST_F(CheckpointDamage, AShardWithoutATensorOrWithAnotherOne) {
  const auto rewrite = [&](const std::function<NamedTensor(const SafetensorsFile&, const SafetensorsEntry&)>& change) {
    fs::copy_file(made_->path() / "step-00000002" / kShard, file(kShard), fs::copy_options::overwrite_existing);
    std::vector<NamedTensor> tensors;
    const SafetensorsFile shard(file(kShard));
    for (const SafetensorsEntry& entry : shard.entries()) tensors.push_back(change(shard, entry));
    write_safetensors(file(kShard), tensors);
    seal_again(step_, kShard);
  };
  const auto is_norm = [](const SafetensorsEntry& entry) { return entry.name == "m.ln_f.bias"; };

  rewrite([&](const auto& shard, const auto& entry) {
    return NamedTensor{is_norm(entry) ? "m.ln_g.bias" : entry.name, shard.tensor(entry.name)};
  });
  expect_refused(std::string(kShard) + ": has no tensor 'm.ln_f.bias', the manifest says it has");
  rewrite([&](const auto& shard, const auto& entry) {
    const TensorView view = shard.tensor(entry.name);
    return NamedTensor{entry.name, is_norm(entry) ? view.reshaped({view.num_elements(), 1}) : view};
  });
  expect_refused("tensor 'm.ln_f.bias' is fp32 [");
  rewrite([&](const auto& shard, const auto& entry) {
    const TensorView view = shard.tensor(entry.name);
    return NamedTensor{entry.name, is_norm(entry) ? TensorView(view.data(), DType::i32, view.shape()) : view};
  });
  expect_refused("tensor 'm.ln_f.bias' is int32 [");
  write(kShard, std::string(fs::file_size(file(kShard)), '?'));
  seal_again(step_, kShard);
  expect_refused("is not a valid safetensors file");
}

TEST_F(CheckpointDamage, FieldsThatAreMissingOrCannotBe) {
  const struct {
    const char* from;
    const char* to;
    const char* words;
  } edits[] = {
      {"\"next_step\": 2", "\"next_stop\": 2", "field 'next_step' is missing"},
      {"\"next_step\": 2", "\"next_step\": -2", "field 'next_step' is -2, not a whole number"},
      {"\"next_step\": 2", "\"next_step\": \"2\"", "field 'next_step' is \"2\", not a whole number"},
      {"\"updates\": 2", "\"updates\": 3", "field 'updates' is 3, more than the 2 steps"},
      {"\"learning_rate\": 0.001", "\"learning_rate\": -1", "field 'learning_rate' is -1, not a finite number"},
      {"\"data\": \"synthetic\"", "\"data\": 7", "field 'data' is no text"},
      {"\"data_identity\"", "\"data_identify\"", "field 'data_identity' is missing"},
      {"\"scale\":1.0", "\"scale\":0", "field 'loss_scale.scale' is 0"},
      {"\"position\":0", "\"position\":0.5", "field 'fp8.position' is 0.5"},
      {"\"libraries\": {", "\"libraries\": [], \"x\": {", "field 'libraries' is no object"},
      {"\"hidden\":8", "\"hidden\":0", "hidden"},
      {"\"name\":\"shard-00000.safetensors\"", "\"name\":\"../x\"", "field 'files[0].name' is '../x', no name of a file"},
      {"\"name\":\"shard-00000.safetensors\"", "\"name\":\"shard-00001.safetensors\"", "field 'files[1].name' is"},
      {"\"xxh128\":\"", "\"xxh128\":\"g", "not 32 hexadecimal digits"},
      {"\"name\":\"wpe.weight\"", "\"name\":\"wte.weight\"", "field 'tensors[1].name' is 'wte.weight' a second time"},
      {"\"dtype\":\"fp32\"", "\"dtype\":\"int8\"", "field 'tensors[0].dtype' is 'int8'"},
      {"\"shape\":[13,8]", "\"shape\":[13,0]", "field 'tensors[0].shape[1]' is 0"},
      {"\"shape\":[13,8]", "\"shape\":[13,88888888888]", "more than the"},
      {"{\"file\":0}", "{\"file\":0,\"elements\":[1,2]}", "field 'tensors[0].pieces' of wte.weight leave a gap: elements 0:1"},
      {"{\"file\":0}", "{\"file\":2}", "is 2, there are 2 files"},
      {"{\"file\":0}", "{\"file\":0,\"elements\":[0,1]}", "leave a gap: elements 1:"},
      {"{\"file\":0}", "{\"file\":0},{\"file\":0}", "has a second piece of the same tensor"},
      {"{\"file\":0}", "{\"file\":0},{\"file\":1}", "overlap: elements 0:"},
      {"{\"file\":0}", "{\"file\":0,\"elements\":[5,2]}", "ends at 2 before it begins at 5"},
      {"{\"file\":0}", "{\"file\":0,\"slices\":[]}", "has 0 dimensions"},
  };
  const std::string intact = read(kManifestName);
  for (const auto& edit : edits) {
    write(kManifestName, intact);
    edit_manifest(edit.from, edit.to);
    EXPECT_NE(damage(VerifyDepth::manifest).find(edit.words), std::string::npos) << edit.to << "\n" << damage();
    EXPECT_NE(damage(VerifyDepth::manifest).find(kManifestName), std::string::npos) << damage();
  }
}

}  // namespace
}  // namespace tandem

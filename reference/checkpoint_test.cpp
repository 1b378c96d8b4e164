// SPDX-License-Identifier: Apache-2.0
#include "reference/checkpoint.h"

#include <cmath>
#include <span>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/hash.h"
#include "core/io/safetensors.h"
#include "core/io/test_folder.h"

namespace tandem::reference {
namespace {

namespace fs = std::filesystem;

StateTensor floats(const Shape& shape, float first) {
  StateTensor tensor{shape, DType::f32, {}};
  for (std::int64_t i = 0; i < num_elements(shape); ++i) {
    const float value = first + static_cast<float>(i);
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    tensor.bytes.insert(tensor.bytes.end(), bytes, bytes + sizeof(value));
  }
  return tensor;
}

State example() {
  State state;
  state.next_step = 7;
  state.updates = 6;
  state.seed = 11;
  state.data_identity = "made up";
  state.learning_rate = 0.1;  // no binary fraction: text must bring all its bits back
  state.loss_scale = 1024;
  state.growth_tracker = 3;
  state.skipped_steps = 1;
  state.fp8_histories = {1.0 / 3, 0};
  state.fp8_position = 1;
  state.tensors.emplace("w", floats({3, 4}, 1));
  state.tensors.emplace("m.w", floats({3, 4}, 100));
  return state;
}

// A step folder as docs/formats.md describes it, by hand: columns 0, 1 and 3 of w [3, 4] on rank 0, column 2 on rank 1; m.w whole
// on rank 1.
struct Sharded {
  TestFolder folder;
  std::string rank0_pieces = R"({"file": 0, "slices": [[[0, 3]], [[0, 2], [3, 4]]]})";
  std::string rank1_piece = R"({"file": 1, "slices": [[[0, 3]], [[2, 3]]]})";

  void write_shard(const char* name, const std::vector<NamedTensor>& tensors) { write_safetensors(folder / name, tensors); }

  [[nodiscard]] std::string file_entry(const char* name) const {
    const std::string content = TestFolder::read(folder / name);
    return fmt::format(R"({{"name": "{}", "bytes": {}, "xxh128": "{}"}})", name, content.size(),
                       to_hex(hash128(std::as_bytes(std::span(content)))));
  }

  void write() {
    std::vector<float> left = {1, 2, 4, 5, 6, 8, 9, 10, 12};
    std::vector<float> right = {3, 7, 11};
    std::vector<float> moments(12);
    for (std::size_t i = 0; i < 12; ++i) moments[i] = 100 + static_cast<float>(i);
    write_shard("shard-00000.safetensors", {{"w", view_of(left, {3, 3})}});
    write_shard("shard-00001.safetensors", {{"w", view_of(right, {3, 1})}, {"m.w", view_of(moments, {3, 4})}});
    write_manifest();
  }

  void write_manifest() const {
    std::string text = fmt::format(
        R"({{"format": "tandem-checkpoint", "version": 2, "next_step": 7, "updates": 6, "learning_rate": 0.1,
"data_identity": "made up", "config": {{"run": {{"seed": 11}}}},
"loss_scale": {{"scale": 1024.0, "growth_tracker": 3, "skipped_steps": 1}},
"fp8": {{"histories": [0.3333333333333333, 0.0], "position": 1}}, "files": [{}, {}],
"tensors": [{{"name": "w", "dtype": "fp32", "shape": [3, 4], "pieces": [{}, {}]}},
{{"name": "m.w", "dtype": "fp32", "shape": [3, 4], "pieces": [{{"file": 1}}]}}],
)",
        file_entry("shard-00000.safetensors"), file_entry("shard-00001.safetensors"), rank0_pieces, rank1_piece);
    text += fmt::format("\"manifest_xxh128\": \"{}\"\n}}\n", to_hex(hash128(std::as_bytes(std::span(text)))));
    static_cast<void>(folder.write("manifest.json", text));
  }

  [[nodiscard]] std::string refusal() const {
    return message_of<InputError>([&] { static_cast<void>(assemble(folder.path())); });
  }
};

TEST(ReferenceCheckpoint, BringsBackEveryBitOfWhatItSaved) {
  const TestFolder folder;
  State state = example();
  state.learning_rate = 0.1 / 3;
  save(folder / "deep/er", state);
  EXPECT_EQ(differences(state, load(folder / "deep/er")), std::vector<std::string>{});
}

TEST(ReferenceCheckpoint, RefusesWhatIsNoStateOfItsOwn) {
  const TestFolder folder;
  static_cast<void>(folder.write("state.json", R"({"format": "else"})"));
  EXPECT_NE(message_of<InputError>([&] { static_cast<void>(load(folder.path())); }).find("format"), std::string::npos);
}

TEST(ReferenceCheckpoint, NamesEachFieldAndTensorThatDiffers) {
  const State one = example();
  State other = one;
  other.updates = 5;
  other.learning_rate = std::nextafter(other.learning_rate, 1);
  other.tensors.at("m.w").bytes.back() ^= std::byte{1};
  other.tensors.erase("w");
  EXPECT_EQ(differences(one, other), (std::vector<std::string>{"updates", "learning_rate", "m.w", "w"}));
}

TEST(ReferenceCheckpoint, PutsPiecesTogetherElementByElement) {
  Sharded sharded;
  sharded.write();
  EXPECT_EQ(differences(example(), assemble(sharded.folder.path())), std::vector<std::string>{});
}

// Column 2 and a row of padding behind it, of which elements [begin, 4) are stored.
void write_flat(Sharded& sharded, std::int64_t begin) {
  const std::vector<float> column = {3, 7, 11, -1};
  std::vector<float> stored(column.begin() + begin, column.end());
  std::vector<float> moments(12);
  for (std::size_t i = 0; i < 12; ++i) moments[i] = 100 + static_cast<float>(i);
  sharded.write_shard("shard-00001.safetensors",
                      {{"w", view_of(stored, {std::ssize(stored)})}, {"m.w", view_of(moments, {3, 4})}});
  sharded.rank1_piece =
      fmt::format(R"({{"file": 1, "slices": [[[0, 3]], [[2, 3]]], "padded_rows": 1, "elements": [{}, 4]}})", begin);
  sharded.write_manifest();
}

TEST(ReferenceCheckpoint, LeavesPaddingOut) {
  Sharded sharded;
  sharded.write();
  write_flat(sharded, 0);
  EXPECT_EQ(differences(example(), assemble(sharded.folder.path())), std::vector<std::string>{});
}

TEST(ReferenceCheckpoint, RefusesPiecesThatLeaveAGap) {
  Sharded sharded;
  sharded.write();
  write_flat(sharded, 1);
  EXPECT_NE(sharded.refusal().find("element 2 of w is given 0 times"), std::string::npos) << sharded.refusal();
}

TEST(ReferenceCheckpoint, RefusesPiecesThatOverlap) {
  Sharded sharded;
  sharded.write();
  sharded.rank1_piece = R"({"file": 1, "slices": [[[0, 3]], [[1, 2]]]})";
  sharded.write_manifest();
  EXPECT_NE(sharded.refusal().find("element 1 of w is given 2 times"), std::string::npos) << sharded.refusal();
}

TEST(ReferenceCheckpoint, RefusesAFileWithAnotherHash) {
  Sharded sharded;
  sharded.write();
  std::string content = TestFolder::read(sharded.folder / "shard-00001.safetensors");
  content.back() = static_cast<char>(content.back() ^ 1);
  static_cast<void>(sharded.folder.write("shard-00001.safetensors", content));
  EXPECT_NE(sharded.refusal().find("shard-00001.safetensors: hash"), std::string::npos) << sharded.refusal();
}

TEST(ReferenceCheckpoint, RefusesAManifestThatWasChanged) {
  Sharded sharded;
  sharded.write();
  std::string text = TestFolder::read(sharded.folder / "manifest.json");
  text.replace(text.find("\"updates\": 6"), 12, "\"updates\": 5");
  static_cast<void>(sharded.folder.write("manifest.json", text));
  EXPECT_NE(sharded.refusal().find("its hash is"), std::string::npos) << sharded.refusal();
}

}  // namespace
}  // namespace tandem::reference

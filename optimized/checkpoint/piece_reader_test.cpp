// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/piece_reader.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "optimized/checkpoint/shard_writer.h"

namespace tandem {
namespace {

// Element i of the tensor "x" is i. Larger than what is read at once, in both directions.
const Shape kShape = {700, 1200};

ShardSpec columns(std::vector<Interval> intervals) {
  ShardSpec shard = whole("x", kShape, DType::f32);
  shard.slices[1] = std::move(intervals);
  return shard;
}

ShardSpec range(ShardSpec shard, Interval elements) {
  shard.flat_range = elements;
  return shard;
}

template <class Element>
CheckpointManifest write_pieces(const TestFolder& folder, const std::vector<ShardSpec>& shards) {
  CheckpointManifest manifest;
  manifest.tensors = {{"x", kShape, dtype_of<Element>, {}}};
  for (const ShardSpec& shard : shards) {
    const std::string file = "f" + std::to_string(manifest.files.size());
    std::vector<Element> values;
    for (const std::int64_t index : global_indices(shard)) values.push_back(static_cast<Element>(index));
    std::vector<Element> other(100, -1);
    write_safetensors(folder / file, std::vector<NamedTensor>{{"before", view_of(other, {100})},
                                                              {"x", view_of(values, stored_shape(shard))},
                                                              {"behind", view_of(other, {100})}});
    manifest.tensors[0].pieces.push_back({manifest.files.size(), shard});
    manifest.files.push_back({file, 0, {}});
  }
  return manifest;
}

void expect_values(const CheckpointManifest& manifest, const TestFolder& folder, const ShardSpec& shard) {
  PieceReader reader(folder.path(), manifest);
  std::vector<float> values(static_cast<std::size_t>(shard.num_elements()), -7);
  std::vector<double> wide(values.size(), -7);

  reader.read(manifest.tensors[0], shard, view_of(values, {std::ssize(values)}));
  reader.read(manifest.tensors[0], shard, view_of(wide, {std::ssize(wide)}));

  const std::vector<std::int64_t> indices = global_indices(shard);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    ASSERT_EQ(values[i], static_cast<float>(std::max<std::int64_t>(indices[i], 0))) << shard.describe_slices() << " " << i;
    ASSERT_EQ(wide[i], static_cast<double>(std::max<std::int64_t>(indices[i], 0))) << shard.describe_slices() << " " << i;
  }
}

TEST(PieceReader, FindsEveryElementWhateverTheCuts) {
  const ShardSpec all = whole("x", kShape, DType::f32);
  ShardSpec padded = all;
  padded.slices[0] = {{350, 700}};
  padded.padded_rows = 3;
  const std::vector<std::vector<ShardSpec>> cuts = {
      {all},
      {range(all, {0, 300'001}), range(all, {300'001, 840'000})},
      {columns({{0, 5}, {600, 1100}}), columns({{5, 600}, {1100, 1200}})},
      {range(columns({{0, 400}}), {0, 99'999}), columns({{400, 1200}}), range(columns({{0, 400}}), {99'999, 280'000})}};
  for (const std::vector<ShardSpec>& pieces : cuts) {
    const TestFolder folder;
    const CheckpointManifest manifest = write_pieces<float>(folder, pieces);
    expect_values(manifest, folder, all);
    expect_values(manifest, folder, padded);
    expect_values(manifest, folder, range(all, {123'456, 700'000}));
    expect_values(manifest, folder, columns({{1, 2}, {599, 601}, {1199, 1200}}));
  }
  const TestFolder folder;
  const CheckpointManifest wide = write_pieces<double>(folder, cuts[2]);
  expect_values(wide, folder, all);
}

TEST(PieceReader, RefusesATensorThatIsNotWhatTheManifestSays) {
  const TestFolder folder;
  CheckpointManifest manifest = write_pieces<float>(folder, {whole("x", kShape, DType::f32)});
  std::vector<float> values(static_cast<std::size_t>(num_elements(kShape)));
  const auto refusal = [&] {
    return message_of<InputError>([&] {
      PieceReader(folder.path(), manifest).read(manifest.tensors[0], whole("x", kShape, DType::f32), view_of(values, kShape));
    });
  };

  manifest.tensors[0].dtype = DType::f64;
  EXPECT_NE(refusal().find("tensor 'x' is fp32 [700, 1200], the manifest says fp64 [700, 1200]"), std::string::npos);
  manifest.tensors[0].name = "y";
  EXPECT_NE(refusal().find("has no tensor 'y'"), std::string::npos);
}

TEST(ConvertElements, RoundsToSixteenBitsByWayOfFp32) {
  const std::vector<double> exact = {1.0, -0.1, 1.00390625000001, 65504.0, 1e-8};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    std::vector<std::uint16_t> bits(exact.size());
    std::vector<float> back(exact.size());
    convert_elements(DType::f64, std::as_bytes(std::span(exact)).data(), dtype, std::as_writable_bytes(std::span(bits)).data(),
                     5);
    convert_elements(dtype, std::as_bytes(std::span(bits)).data(), DType::f32, std::as_writable_bytes(std::span(back)).data(), 5);
    for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_EQ(back[i], round_to(static_cast<float>(exact[i]), dtype));
  }
}

// Larger than what the writer keeps, in pieces that fit nothing.
TEST(ShardWriter, HashesAndWritesEveryByteOfAFileOfManyPieces) {
  const TestFolder folder;
  std::vector<std::uint32_t> values(3'500'001);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint32_t>(i * 2654435761U);
  const auto bytes = std::as_bytes(std::span(values));
  const std::vector<TensorHeading> headings = {{"all", DType::i32, {std::ssize(values)}}};
  ShardWriter writer(system_files(), folder / "shard.safetensors", headings);
  constexpr std::size_t kSizes[] = {4, 5'000'003, 1, 4'194'304, 700'001};
  std::size_t at = 0;
  for (std::size_t i = 0; at < bytes.size(); ++i) {
    const std::size_t size = std::min(kSizes[i % std::size(kSizes)], bytes.size() - at);
    writer.write(bytes.subspan(at, size));
    at += size;
  }
  const CheckpointFile file = writer.finish();
  const std::string text = TestFolder::read(folder / "shard.safetensors");
  EXPECT_EQ(file.bytes, std::ssize(text));
  EXPECT_EQ(file.hash, hash128(std::as_bytes(std::span(text))));
  ASSERT_GE(text.size(), bytes.size());
  EXPECT_EQ(std::memcmp(text.data() + text.size() - bytes.size(), bytes.data(), bytes.size()), 0);
}

TEST(ShardWriter, RefusesMoreOrFewerBytesThanItAnnounced) {
  const TestFolder folder;
  const std::vector<TensorHeading> headings = {{"four", DType::u8, {4}}};
  const std::vector<std::byte> bytes(5);
  ShardWriter fewer(system_files(), folder / "fewer", headings);
  fewer.write(std::span(bytes).first(3));
  EXPECT_THROW((void)fewer.finish(), ContractError);
  ShardWriter more(system_files(), folder / "more", headings);
  more.write(bytes);
  EXPECT_THROW((void)more.finish(), ContractError);
}

}  // namespace
}  // namespace tandem

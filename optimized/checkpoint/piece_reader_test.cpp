// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/piece_reader.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"

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

}  // namespace
}  // namespace tandem

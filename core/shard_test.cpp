// SPDX-License-Identifier: Apache-2.0
#include "core/shard.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Shard, WholeIsACopy) {
  const ShardSpec shard = whole("wpe.weight", {2, 3}, DType::f32);
  std::vector<double> global(6, -1);

  scatter_into(shard, {0, 1, 2, 3, 4, 5}, global);

  EXPECT_EQ(shard.num_elements(), 6);
  EXPECT_EQ(global, (std::vector<double>{0, 1, 2, 3, 4, 5}));
}

TEST(Shard, SeveralBoxesOfColumnsLandInTheirPlaces) {
  ShardSpec shard = whole("h.0.attn.c_attn.weight", {2, 6}, DType::f32);
  shard.boxes = {{{0, 2}, {1, 2}}, {{0, 2}, {3, 4}}, {{0, 2}, {5, 6}}};  // the odd columns, as three boxes
  std::vector<double> global(12, -1);

  scatter_into(shard, {1, 7, 3, 9, 5, 11}, global);

  EXPECT_EQ(shard.num_elements(), 6);
  EXPECT_EQ(global, (std::vector<double>{-1, 1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11}));
}

TEST(Shard, FlatRangeIsCutFromTheConcatenatedBoxes) {
  ShardSpec shard = whole("w", {2, 4}, DType::f32);
  shard.boxes = {{{0, 2}, {0, 1}}, {{0, 2}, {2, 4}}};  // local order: 0 4 | 2 3 6 7
  shard.flat_range = Interval{1, 4};
  std::vector<double> global(8, -1);

  scatter_into(shard, {4, 2, 3}, global);

  EXPECT_EQ(shard.num_elements(), 3);
  EXPECT_EQ(global, (std::vector<double>{-1, -1, 2, 3, 4, -1, -1, -1}));
}

TEST(Shard, BoxesOfThreeDimensionsLandInTheirPlaces) {
  ShardSpec shard = whole("w", {2, 3, 4}, DType::f32);
  shard.boxes = {{{1, 2}, {1, 3}, {2, 4}}};
  std::vector<double> global(24, 0);

  scatter_into(shard, {18, 19, 22, 23}, global);

  for (std::size_t i = 0; i < global.size(); ++i) {
    const bool inside = i == 18 || i == 19 || i == 22 || i == 23;
    EXPECT_EQ(global[i], inside ? static_cast<double>(i) : 0.0) << i;
  }
}

TEST(Shard, EmptyBoxHoldsNothing) {
  ShardSpec shard = whole("w", {4}, DType::f32);
  shard.boxes = {{{4, 4}}};
  std::vector<double> global(4, -1);

  scatter_into(shard, {}, global);

  EXPECT_EQ(shard.num_elements(), 0);
  EXPECT_EQ(global, std::vector<double>(4, -1));
}

TEST(Shard, ScalarHasOneElement) { EXPECT_EQ(whole("step", {}, DType::i64).num_elements(), 1); }

TEST(Shard, RefusesVectorsOfTheWrongLength) {
  const ShardSpec shard = whole("w", {4}, DType::f32);
  std::vector<double> global(4);
  std::vector<double> short_global(3);

  EXPECT_THROW(scatter_into(shard, {1, 2, 3}, global), ContractError);
  EXPECT_THROW(scatter_into(shard, {1, 2, 3, 4}, short_global), ContractError);
}

}  // namespace
}  // namespace tandem

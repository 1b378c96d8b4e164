// SPDX-License-Identifier: Apache-2.0
#include "core/shard.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

TEST(Shard, WholeIsACopy) {
  const ShardSpec shard = whole("wpe.weight", {2, 3}, DType::f32);
  std::vector<double> global(6, -1);

  scatter_into(shard, {0, 1, 2, 3, 4, 5}, global);

  EXPECT_EQ(shard.num_elements(), 6);
  EXPECT_EQ(global, (std::vector<double>{0, 1, 2, 3, 4, 5}));
}

TEST(Shard, IntervalsOfColumnsLandInTheirPlaces) {
  ShardSpec shard = whole("w", {2, 6}, DType::f32);
  shard.slices[1] = {{1, 2}, {3, 4}, {5, 6}};  // the odd columns
  std::vector<double> global(12, -1);

  scatter_into(shard, {1, 3, 5, 7, 9, 11}, global);

  EXPECT_EQ(shard.num_elements(), 6);
  EXPECT_EQ(shard.local_shape(), (Shape{2, 3}));
  EXPECT_EQ(global, (std::vector<double>{-1, 1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11}));
}

// Rank 1 of 2 of a fused query-key-value weight, four heads of two columns: heads 2 and 3 of each third.
TEST(Shard, FusedQueryKeyValueColumnsAreThreeIntervals) {
  ShardSpec shard = whole("h.0.attn.c_attn.weight", {2, 24}, DType::f32);
  shard.slices[1] = {{4, 8}, {12, 16}, {20, 24}};

  EXPECT_EQ(shard.local_shape(), (Shape{2, 12}));
  EXPECT_EQ(shard.describe_slices(), "[0:2, 4:8+12:16+20:24]");
  EXPECT_EQ(global_indices(shard), (std::vector<std::int64_t>{4,  5,  6,  7,  12, 13, 14, 15, 20, 21, 22, 23,  //
                                                              28, 29, 30, 31, 36, 37, 38, 39, 44, 45, 46, 47}));
}

TEST(Shard, IntervalsOfSeveralDimensionsAreCombined) {
  ShardSpec shard = whole("w", {4, 3, 4}, DType::f32);
  shard.slices = {{{0, 1}, {3, 4}}, {{1, 2}}, {{0, 1}, {2, 4}}};

  EXPECT_EQ(shard.local_shape(), (Shape{2, 1, 3}));
  EXPECT_EQ(global_indices(shard), (std::vector<std::int64_t>{4, 6, 7, 40, 42, 43}));
}

// A zig-zag slice of tokens: chunks 1 and 2 of four.
TEST(Shard, IntervalsOfTokensKeepTheirOrder) {
  ShardSpec shard = whole("h.0.ln_1", {7, 2}, DType::f32);
  shard.slices[0] = {{2, 4}, {4, 6}};

  EXPECT_EQ(global_indices(shard), (std::vector<std::int64_t>{4, 5, 6, 7, 8, 9, 10, 11}));
}

TEST(Shard, PaddingRowsBelongToNoGlobalElement) {
  ShardSpec shard = whole("wte.weight", {5, 2}, DType::f32);  // the second of two ranks of three rows each
  shard.slices[0] = {{3, 5}};
  shard.padded_rows = 1;
  std::vector<double> global(10, -1);

  EXPECT_EQ(shard.local_shape(), (Shape{3, 2}));
  EXPECT_EQ(shard.num_elements(), 6);
  EXPECT_EQ(global_indices(shard), (std::vector<std::int64_t>{6, 7, 8, 9, -1, -1}));
  EXPECT_EQ(gather_from(shard, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}), (std::vector<double>{6, 7, 8, 9, 0, 0}));

  scatter_into(shard, {6, 7, 8, 9, 100, 100}, global);
  EXPECT_EQ(global, (std::vector<double>{-1, -1, -1, -1, -1, -1, 6, 7, 8, 9}));
}

TEST(Shard, FlatRangeIsCutFromTheLocalTensorPaddingIncluded) {
  ShardSpec shard = whole("w", {3, 4}, DType::f32);
  shard.slices = {{{1, 3}}, {{0, 1}, {2, 4}}};  // local order: 4 6 7 8 10 11 and three of padding
  shard.padded_rows = 1;
  shard.flat_range = Interval{1, 8};
  std::vector<double> global(12, -1);

  scatter_into(shard, {6, 7, 8, 10, 11, 50, 50}, global);

  EXPECT_EQ(shard.num_elements(), 7);
  EXPECT_EQ(global, (std::vector<double>{-1, -1, -1, -1, -1, -1, 6, 7, 8, -1, 10, 11}));
  EXPECT_EQ(shard.describe_slices(), "[1:3, 0:1+2:4] elements 1:8");
}

TEST(Shard, EmptyIntervalHoldsNothing) {
  ShardSpec shard = whole("w", {4}, DType::f32);
  shard.slices = {{{4, 4}}};
  std::vector<double> global(4, -1);

  scatter_into(shard, {}, global);

  EXPECT_EQ(shard.num_elements(), 0);
  EXPECT_EQ(global, std::vector<double>(4, -1));
}

TEST(Shard, SlicesOfAllRanksRebuildTheTensor) {
  const std::vector<double> global = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};  // [5, 4]
  std::vector<double> rebuilt(20, -1);
  for (int row_rank = 0; row_rank < 3; ++row_rank) {
    for (int column_rank = 0; column_rank < 2; ++column_rank) {
      ShardSpec shard = whole("w", {5, 4}, DType::f32);
      shard.slices = {{balanced_part(5, 3, row_rank)}, {{column_rank, column_rank + 1}, {column_rank + 2, column_rank + 3}}};
      shard.padded_rows = 2 - shard.slices[0][0].size();
      scatter_into(shard, gather_from(shard, global), rebuilt);
    }
  }
  EXPECT_EQ(rebuilt, global);
}

TEST(Shard, KnowsWhetherItIsWhole) {
  ShardSpec shard = whole("w", {3, 2}, DType::f32);
  EXPECT_TRUE(shard.is_whole());
  EXPECT_EQ(shard.describe_slices(), "whole");

  ShardSpec padded = shard;
  padded.padded_rows = 1;
  EXPECT_FALSE(padded.is_whole());
  EXPECT_EQ(padded.describe_slices(), "[0:3, 0:2]");
  ShardSpec cut = shard;
  cut.slices[1] = {{0, 1}};
  EXPECT_FALSE(cut.is_whole());
  ShardSpec range = shard;
  range.flat_range = Interval{0, 6};
  EXPECT_FALSE(range.is_whole());
}

TEST(Shard, ScalarHasOneElement) { EXPECT_EQ(whole("step", {}, DType::i64).num_elements(), 1); }

TEST(Shard, RefusesVectorsOfTheWrongLength) {
  const ShardSpec shard = whole("w", {4}, DType::f32);
  std::vector<double> global(4);
  std::vector<double> short_global(3);

  EXPECT_THROW(scatter_into(shard, {1, 2, 3}, global), ContractError);
  EXPECT_THROW(scatter_into(shard, {1, 2, 3, 4}, short_global), ContractError);
  EXPECT_THROW((void)gather_from(shard, short_global), ContractError);
}

TEST(Shard, RefusesSlicesOfOtherDimensions) {
  ShardSpec shard = whole("w", {4, 2}, DType::f32);
  shard.slices.pop_back();

  EXPECT_THROW((void)global_indices(shard), ContractError);
}

}  // namespace
}  // namespace tandem

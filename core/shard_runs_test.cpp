// SPDX-License-Identifier: Apache-2.0
#include "core/shard_runs.h"

#include <algorithm>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

namespace tandem {
namespace {

ShardSpec shard_of(Shape shape, std::vector<std::vector<Interval>> slices) {
  ShardSpec shard = whole("x", std::move(shape), DType::f32);
  shard.slices = std::move(slices);
  return shard;
}

// Disjoint intervals of [0, extent), sometimes empty, neighbours or out of order.
std::vector<Interval> random_intervals(std::mt19937& random, std::int64_t extent) {
  std::vector<std::int64_t> cuts = {0, extent};
  for (auto n = random() % 5; n > 0; --n) cuts.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(extent + 1)));
  std::ranges::sort(cuts);
  std::vector<Interval> intervals;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    if (random() % 3 != 0) intervals.push_back({cuts[i], cuts[i + 1]});
  }
  if (random() % 4 == 0) std::ranges::reverse(intervals);
  return intervals;
}

ShardSpec random_shard(std::mt19937& random, const Shape& shape) {
  ShardSpec shard = whole("x", shape, DType::f32);
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    if (random() % 3 != 0) shard.slices[dim] = random_intervals(random, shape[dim]);
  }
  if (random() % 3 == 0) shard.padded_rows = static_cast<std::int64_t>(random() % 3);
  const std::int64_t elements = num_elements(shard.local_shape());
  if (random() % 2 == 0) {
    auto one = static_cast<std::int64_t>(random() % static_cast<unsigned>(elements + 1));
    auto other = static_cast<std::int64_t>(random() % static_cast<unsigned>(elements + 1));
    shard.flat_range = {std::min(one, other), std::max(one, other)};
  }
  return shard;
}

Shape random_shape(std::mt19937& random) {
  Shape shape;
  for (auto n = 1 + random() % 3; n > 0; --n) shape.push_back(1 + static_cast<std::int64_t>(random() % 7));
  return shape;
}

TEST(ShardRuns, OfAWholeTensorAreOne) {
  EXPECT_EQ(shard_runs(whole("x", {3, 4, 5}, DType::f32)), (std::vector<ShardRun>{{0, 0, 60}}));
  EXPECT_EQ(shard_runs(whole("x", {}, DType::f32)), (std::vector<ShardRun>{{0, 0, 1}}));
}

TEST(ShardRuns, OfRowsAreOneAndOfColumnsOneForEachRowAndInterval) {
  EXPECT_EQ(shard_runs(shard_of({4, 6}, {{{1, 3}}, {{0, 6}}})), (std::vector<ShardRun>{{6, 0, 12}}));
  EXPECT_EQ(shard_runs(shard_of({2, 9}, {{{0, 2}}, {{1, 2}, {4, 5}, {7, 8}}})),
            (std::vector<ShardRun>{{1, 0, 1}, {4, 1, 1}, {7, 2, 1}, {10, 3, 1}, {13, 4, 1}, {16, 5, 1}}));
}

TEST(ShardRuns, JoinTheEndOfARowWithTheBeginOfTheNext) {
  EXPECT_EQ(shard_runs(shard_of({2, 6}, {{{0, 2}}, {{0, 1}, {5, 6}}})),
            (std::vector<ShardRun>{{0, 0, 1}, {5, 1, 2}, {11, 3, 1}}));
}

TEST(ShardRuns, OfAFlatRangeBeginInTheMiddleOfARunAndLeavePaddingOut) {
  ShardSpec shard = shard_of({5, 4}, {{{3, 5}}, {{0, 4}}});
  shard.padded_rows = 1;
  shard.flat_range = {3, 11};
  EXPECT_EQ(shard_runs(shard), (std::vector<ShardRun>{{15, 0, 5}}));
  shard.flat_range = {8, 11};
  EXPECT_TRUE(shard_runs(shard).empty());
}

TEST(ShardRuns, AreTheGlobalIndicesOfRandomShards) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 3000; ++trial) {
    const ShardSpec shard = random_shard(random, random_shape(random));
    const std::vector<ShardRun> runs = shard_runs(shard);

    std::vector<std::int64_t> indices(static_cast<std::size_t>(shard.num_elements()), -1);
    for (const ShardRun& run : runs) {
      for (std::int64_t i = 0; i < run.count; ++i) indices.at(static_cast<std::size_t>(run.local + i)) = run.global + i;
    }
    ASSERT_EQ(indices, global_indices(shard)) << to_string(shard.global_shape) << " " << shard.describe_slices();
    for (std::size_t i = 1; i < runs.size(); ++i) {
      ASSERT_LE(runs[i - 1].global + runs[i - 1].count, runs[i].global) << shard.describe_slices();
      const bool joined =
          runs[i - 1].global + runs[i - 1].count == runs[i].global && runs[i - 1].local + runs[i - 1].count == runs[i].local;
      ASSERT_FALSE(joined) << shard.describe_slices();
    }
  }
}

TEST(ShardRuns, RefuseSlicesThatLeaveTheTensorOrOverlap) {
  EXPECT_THROW((void)shard_runs(shard_of({4}, {{{2, 5}}})), ContractError);
  EXPECT_THROW((void)shard_runs(shard_of({4}, {{{-1, 2}}})), ContractError);
  EXPECT_THROW((void)shard_runs(shard_of({4}, {{{0, 3}, {2, 4}}})), ContractError);
  EXPECT_THROW((void)shard_runs(shard_of({4, 4}, {{{0, 4}}})), ContractError);
  ShardSpec beyond = whole("x", {4}, DType::f32);
  beyond.flat_range = {2, 5};
  EXPECT_THROW((void)shard_runs(beyond), ContractError);
}

TEST(CopyCommon, MovesWhatTwoRandomShardsShareAndNothingElse) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 2000; ++trial) {
    const Shape shape = random_shape(random);
    const ShardSpec from = random_shard(random, shape);
    const ShardSpec to = random_shard(random, shape);
    const std::vector<std::int64_t> from_indices = global_indices(from);
    const std::vector<std::int64_t> to_indices = global_indices(to);
    std::vector<std::int32_t> source(from_indices.begin(), from_indices.end());
    std::vector<std::int32_t> target(to_indices.size(), -7);

    const std::int64_t copied = copy_common(shard_runs(from), std::as_bytes(std::span(source)), shard_runs(to),
                                            std::as_writable_bytes(std::span(target)), sizeof(std::int32_t));

    std::int64_t common = 0;
    for (std::size_t i = 0; i < to_indices.size(); ++i) {
      const bool shared = to_indices[i] >= 0 && std::ranges::find(from_indices, to_indices[i]) != from_indices.end();
      ASSERT_EQ(target[i], shared ? to_indices[i] : -7) << from.describe_slices() << " to " << to.describe_slices();
      common += shared ? 1 : 0;
    }
    ASSERT_EQ(copied, common);
  }
}

TEST(CopyCommon, RefusesBuffersThatAreTooShort) {
  const std::vector<ShardRun> runs = shard_runs(whole("x", {4}, DType::f32));
  std::vector<std::byte> full(16), cut(12);
  EXPECT_THROW((void)copy_common(runs, full, runs, cut, 4), ContractError);
  EXPECT_THROW((void)copy_common(runs, cut, runs, full, 4), ContractError);
}

}  // namespace
}  // namespace tandem

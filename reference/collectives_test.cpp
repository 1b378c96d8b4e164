// SPDX-License-Identifier: Apache-2.0
#include "reference/collectives.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

using Ranks = PerRank<std::int32_t>;

const Ranks kInputs = {{1, 2, 3, 4, 5}, {10, 20, 30, 40, 50}, {100, 200, 300, 400, 500}};

TEST(ReferenceCollectives, AllReduceGivesTheSumToEveryRank) {
  EXPECT_EQ(all_reduce(kInputs), (Ranks(3, {111, 222, 333, 444, 555})));
}

TEST(ReferenceCollectives, SumsAreFormedInOrderOfRanks) {
  // 1 + 2^-24 rounds to 1 in fp32, twice; 2^-24 + 2^-24 + 1 does not.
  const float half_step = 0x1.0p-24F;

  EXPECT_EQ(all_reduce(PerRank<float>{{1.0F}, {half_step}, {half_step}})[2][0], 1.0F);
  EXPECT_EQ(all_reduce(PerRank<float>{{half_step}, {half_step}, {1.0F}})[0][0], 1.0F + 0x1.0p-23F);
}

TEST(ReferenceCollectives, ReduceScatterCutsTheSumByCounts) {
  EXPECT_EQ(reduce_scatter(kInputs, {2, 0, 3}), (Ranks{{111, 222}, {}, {333, 444, 555}}));
}

TEST(ReferenceCollectives, AllGatherJoinsPartsOfAnySize) { EXPECT_EQ(all_gather(Ranks{{1, 2}, {}, {3}}), (Ranks(3, {1, 2, 3}))); }

TEST(ReferenceCollectives, AllToAllTransposes) {
  // Rank 0 has one element for itself and two for rank 1; rank 1 has three for rank 0 and none for itself.
  EXPECT_EQ(all_to_all(Ranks{{1, 2, 3}, {4, 5, 6}}, {{1, 2}, {3, 0}}), (Ranks{{1, 4, 5, 6}, {2, 3}}));
}

TEST(ReferenceCollectives, BroadcastCopiesTheRoot) { EXPECT_EQ(broadcast(Ranks{{1}, {2}, {3}}, 1), (Ranks{{2}, {2}, {2}})); }

TEST(ReferenceCollectives, RefusesCountsThatDoNotAddUp) {
  EXPECT_THROW((void)reduce_scatter(kInputs, {2, 2, 2}), ContractError);
  EXPECT_THROW((void)reduce_scatter(kInputs, {2, 2, 0}), ContractError);
  EXPECT_THROW((void)reduce_scatter(kInputs, {2, 3}), ContractError);
  EXPECT_THROW((void)all_to_all(Ranks{{1}, {2}}, {{1, 1}, {1, 0}}), ContractError);
  EXPECT_THROW((void)all_reduce(Ranks{{1}, {2, 3}}), ContractError);
}

// 4 ranks, 8 kB, 2 ms and 1 MB/s: a part is 2 kB, 2 ms on the way; the whole 8 ms.
const AlphaBeta kLink = {2e-3, 1e6};

TEST(ClosedForms, OfFourRanksByHand) {
  EXPECT_DOUBLE_EQ(direct_parts_seconds(4, 8000, kLink), 8e-3);  // 2 + 3 * 2
  EXPECT_DOUBLE_EQ(direct_all_reduce_seconds(4, 8000, kLink), 16e-3);
  EXPECT_DOUBLE_EQ(ring_parts_seconds(4, 8000, kLink), 12e-3);  // 3 * (2 + 2)
  EXPECT_DOUBLE_EQ(ring_all_reduce_seconds(4, 8000, kLink), 24e-3);
  EXPECT_DOUBLE_EQ(recursive_parts_seconds(4, 8000, kLink), 10e-3);  // (2 + 4) + (2 + 2)
  EXPECT_DOUBLE_EQ(recursive_all_reduce_seconds(4, 8000, kLink), 20e-3);
  EXPECT_DOUBLE_EQ(tree_broadcast_seconds(4, 8000, kLink), 20e-3);  // 2 * (2 + 8)
  EXPECT_DOUBLE_EQ(tree_all_reduce_seconds(4, 8000, kLink), 40e-3);
  EXPECT_DOUBLE_EQ(naive_all_reduce_seconds(4, 8000, kLink), 52e-3);  // 2 * (2 + 3 * 8)
  EXPECT_DOUBLE_EQ(direct_broadcast_seconds(4, 8000, kLink), 26e-3);  // 2 + 3 * 8
  EXPECT_DOUBLE_EQ(ring_broadcast_seconds(4, 8000, kLink), 20e-3);    // 8 + 12
}

TEST(ClosedForms, OfRanksThatAreNoPowerOfTwo) {
  // 6 ranks: two pairs meet and part, 2 * (2 + 8); four ranks halve and double, 20.
  EXPECT_DOUBLE_EQ(recursive_all_reduce_seconds_of_any(6, 8000, kLink), 40e-3);
  EXPECT_DOUBLE_EQ(recursive_all_reduce_seconds_of_any(4, 8000, kLink), 20e-3);
  EXPECT_DOUBLE_EQ(ring_all_reduce_seconds(5, 10000, kLink), 32e-3);  // 8 * (2 + 2)
  EXPECT_THROW((void)tree_broadcast_seconds(6, 8000, kLink), ContractError);
  EXPECT_THROW((void)recursive_parts_seconds(3, 8000, kLink), ContractError);
}

TEST(ClosedForms, OfTwoLevelsByHand) {
  // 2 nodes of 3: in the node 4 kB parts, 2 * (1 + 1) ms; between nodes 2 kB, 1 * (5 + 2) ms.
  const TwoLevels link = {.nodes = 2, .ranks_per_node = 3, .near = {1e-3, 4e6}, .far = {5e-3, 1e6}};

  EXPECT_DOUBLE_EQ(hierarchical_parts_seconds(12000, link), 11e-3);
  EXPECT_DOUBLE_EQ(hierarchical_all_reduce_seconds(12000, link), 22e-3);
}

TEST(ClosedForms, OneRankNeedsNoTimeInRings) { EXPECT_EQ(ring_all_reduce_seconds(1, 8000, kLink), 0); }

TEST(BusBandwidth, IsThatOfNcclTests) {
  EXPECT_DOUBLE_EQ(algorithm_bandwidth(6e9, 2), 3e9);
  EXPECT_DOUBLE_EQ(all_reduce_bus_factor(4), 1.5);
  EXPECT_DOUBLE_EQ(all_reduce_bus_factor(2), 1);
  EXPECT_DOUBLE_EQ(parts_bus_factor(4), 0.75);
  EXPECT_EQ(kBroadcastBusFactor, 1);
}

TEST(BusBandwidth, IsTheLinksForARingWithoutLatency) {
  for (int ranks = 2; ranks <= 9; ++ranks) {
    const AlphaBeta link = {0, 3e9};
    const double seconds = ring_all_reduce_seconds(ranks, 1e6, link);
    EXPECT_NEAR(algorithm_bandwidth(1e6, seconds) * all_reduce_bus_factor(ranks), 3e9, 1);
    const double gather_seconds = ring_parts_seconds(ranks, 1e6, link);
    EXPECT_NEAR(algorithm_bandwidth(1e6, gather_seconds) * parts_bus_factor(ranks), 3e9, 1);
  }
}

TEST(BusBandwidth, BytesThatARingSends) {
  EXPECT_DOUBLE_EQ(least_all_reduce_bytes(4, 8000), 12000);
  EXPECT_DOUBLE_EQ(least_all_reduce_bytes(1, 8000), 0);
}

}  // namespace
}  // namespace tandem::reference

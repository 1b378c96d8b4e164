// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/collectives/collectives_test_support.h"

namespace tandem::collectives_test {
namespace {

using Algorithm = CollectiveAlgorithm;
using Kind = CollectiveKind;

constexpr std::array kAlgorithms = {Algorithm::direct, Algorithm::ring, Algorithm::recursive, Algorithm::tree,
                                    Algorithm::hierarchical};
constexpr std::array kKinds = {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather, Kind::all_to_all, Kind::broadcast};
constexpr std::int64_t kElements = 2520;  // 1 to 9 equal parts, and the halves of each
constexpr std::int64_t kBytes = 4 * kElements;

LinkProfile levels(int ranks_per_node, const LinkLevel& in_node, const LinkLevel& between_nodes) {
  LinkProfile link;
  link.ranks_per_node = ranks_per_node;
  link.in_node = in_node;
  link.between_nodes = between_nodes;
  return link;
}

LinkLevel level(double latency_seconds, double bytes_per_second) {
  LinkLevel result;
  result.latency_seconds = latency_seconds;
  result.bytes_per_second = bytes_per_second;
  return result;
}

LinkProfile flat_link() { return levels(64, level(2e-3, 1e6), level(1, 1)); }
LinkProfile two_levels(int ranks_per_node) { return levels(ranks_per_node, level(1e-3, 4e6), level(5e-3, 1e6)); }

void carry_out(ThreadPeers& peers, Algorithm algorithm, Kind kind) {
  const auto ranks = static_cast<std::size_t>(peers.size());
  const std::vector<std::int64_t> counts(ranks, kElements / peers.size());
  std::vector<std::byte> whole(kBytes), other(kBytes);
  const std::span<std::byte> part = std::span(other).first(kBytes / ranks);
  switch (kind) {
    case Kind::all_reduce: return all_reduce(peers, algorithm, DType::f32, whole);
    case Kind::reduce_scatter: return reduce_scatter(peers, algorithm, DType::f32, whole, part, counts);
    case Kind::all_gather: return all_gather(peers, algorithm, DType::f32, part, whole, counts);
    case Kind::all_to_all: return all_to_all(peers, algorithm, DType::f32, whole, counts, other, counts);
    case Kind::broadcast: return broadcast(peers, algorithm, whole, 0);
  }
}

// Seconds that the link's model gives to the messages that really go to and fro.
double replayed_seconds(Algorithm algorithm, Kind kind, int ranks, const LinkProfile& link) {
  std::vector<int> nodes;
  for (int rank = 0; rank < ranks; ++rank) nodes.push_back(rank / link.ranks_per_node);
  std::vector<double> seconds(nodes.size());
  LinkModel model(link, ranks);
  run_peers(nodes, [&](ThreadPeers& peers) {
    peers.set_link(model);
    carry_out(peers, algorithm, kind);
    seconds[static_cast<std::size_t>(peers.rank())] = peers.clock_seconds();
  });
  return *std::ranges::max_element(seconds);
}

std::string text(Algorithm algorithm, Kind kind, int ranks, const LinkProfile& link) {
  return std::string(name(algorithm)) + ", kind " + std::to_string(static_cast<int>(kind)) + ", " + std::to_string(ranks) +
         " ranks of " + std::to_string(link.ranks_per_node) + " a node";
}

bool is_power_of_two(int n) { return (n & (n - 1)) == 0; }

void expect_close(double replayed, double expected, double tolerance, const std::string& what, Algorithm algorithm, int ranks) {
  const double ratio = replayed / expected;
  if (algorithm == Algorithm::recursive && !is_power_of_two(ranks)) {
    // What the core sends meanwhile covers up a latency or two of the ranks that join it.
    EXPECT_LE(ratio, 1 + 1e-5) << what;
    EXPECT_GE(ratio, 0.55) << what;
  } else {
    EXPECT_NEAR(ratio, 1, tolerance) << what;
  }
}

TEST(CollectiveCost, IsWhatTheMessagesTakeOnOneLevel) {
  const LinkProfile link = flat_link();
  for (const Kind kind : kKinds) {
    for (const Algorithm algorithm : kAlgorithms) {
      if (!supports(algorithm, kind)) continue;
      for (int ranks = 2; ranks <= 9; ++ranks) {
        const double expected = expected_seconds(algorithm, kind, kBytes, ranks, link);

        const double replayed = replayed_seconds(algorithm, kind, ranks, link);

        expect_close(replayed, expected, 1e-5, text(algorithm, kind, ranks, link), algorithm, ranks);
      }
    }
  }
}

void expect_close_on_two_levels(int ranks, int per_node, double tolerance) {
  const LinkProfile link = two_levels(per_node);
  for (const Kind kind : kKinds) {
    for (const Algorithm algorithm : kAlgorithms) {
      if (!supports(algorithm, kind)) continue;
      const double expected = expected_seconds(algorithm, kind, kBytes, ranks, link);

      const double replayed = replayed_seconds(algorithm, kind, ranks, link);

      expect_close(replayed, expected, tolerance, text(algorithm, kind, ranks, link), algorithm, ranks);
    }
  }
}

TEST(CollectiveCost, IsWhatTheMessagesTakeOnTwoLevelsWithNodesOfEqualSize) {
  for (const auto& [ranks, per_node] : {std::pair{4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}, {5, 1}}) {
    expect_close_on_two_levels(ranks, per_node, 1e-5);
  }
}

TEST(CollectiveCost, IsAnEstimateWhereTheLastNodeIsSmallerOrNumbersAreOdd) {
  for (const auto& [ranks, per_node] : {std::pair{3, 2}, {5, 2}, {7, 3}, {9, 4}})
    expect_close_on_two_levels(ranks, per_node, 0.35);
}

// Without latencies: what counts is who hands over how many bytes.
TEST(CollectiveCost, HierarchicalOnUnevenNodesIsItsBytes) {
  for (const auto& [ranks, per_node] : {std::pair{5, 2}, {5, 3}, {7, 3}, {9, 4}}) {
    LinkProfile link = two_levels(per_node);
    link.in_node.latency_seconds = link.between_nodes.latency_seconds = 0;
    for (const Kind kind : {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather}) {
      const double expected = expected_seconds(Algorithm::hierarchical, kind, kBytes, ranks, link);

      const double replayed = replayed_seconds(Algorithm::hierarchical, kind, ranks, link);

      EXPECT_NEAR(replayed / expected, 1, 0.2) << text(Algorithm::hierarchical, kind, ranks, link);
    }
  }
}

TEST(CollectiveCost, RanksThatAreAloneOrHaveNothingToSendNeedNoTime) {
  EXPECT_EQ(expected_seconds(Algorithm::ring, Kind::all_reduce, kBytes, 1, flat_link()), 0);
  EXPECT_EQ(expected_seconds(Algorithm::direct, Kind::broadcast, 0, 4, flat_link()), 0);
  EXPECT_THROW((void)expected_seconds(Algorithm::direct, Kind::broadcast, 8, 0, flat_link()), ContractError);
}

TEST(CollectiveCost, GrowsWithTheDilation) {
  LinkProfile link = two_levels(2);
  const double plain = expected_seconds(Algorithm::hierarchical, Kind::all_reduce, kBytes, 4, link);
  link.dilation = 8;

  EXPECT_NEAR(expected_seconds(Algorithm::hierarchical, Kind::all_reduce, kBytes, 4, link), 8 * plain, 1e-12);
}

TEST(CollectiveChoice, FewerLatenciesForSmallAndFewerBytesBetweenNodesForLargeMessages) {
  const LinkProfile link = two_levels(4);

  EXPECT_EQ(choose_algorithm(Kind::all_reduce, 8, 16, link), Algorithm::direct);
  EXPECT_EQ(choose_algorithm(Kind::all_reduce, 64 << 20, 16, link), Algorithm::hierarchical);
  EXPECT_EQ(choose_algorithm(Kind::all_to_all, 64 << 20, 16, link), Algorithm::direct);
}

TEST(CollectiveChoice, ABroadcastUsesTheRootsPortOnceForLargeMessages) {
  const LinkProfile link = flat_link();

  EXPECT_EQ(choose_algorithm(Kind::broadcast, 8, 8, link), Algorithm::direct);
  EXPECT_EQ(choose_algorithm(Kind::broadcast, 2000, 8, link), Algorithm::tree);
  EXPECT_EQ(choose_algorithm(Kind::broadcast, 64 << 20, 8, link), Algorithm::ring);
}

TEST(CollectiveChoice, IsTheFastestOfAllAndWhatAutomaticCosts) {
  for (const int per_node : {1, 2, 4, 8}) {
    for (const Kind kind : kKinds) {
      for (std::int64_t bytes = 8; bytes <= 64 << 20; bytes *= 8) {
        const LinkProfile link = two_levels(per_node);
        const Algorithm chosen = choose_algorithm(kind, bytes, 8, link);
        const double seconds = expected_seconds(chosen, kind, bytes, 8, link);

        EXPECT_TRUE(supports(chosen, kind));
        for (const Algorithm other : kAlgorithms) EXPECT_LE(seconds, expected_seconds(other, kind, bytes, 8, link));
        EXPECT_EQ(seconds, expected_seconds(Algorithm::automatic, kind, bytes, 8, link));
      }
    }
  }
}

}  // namespace
}  // namespace tandem::collectives_test

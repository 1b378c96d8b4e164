// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/collectives/collectives_test_support.h"

namespace tandem::collectives_test {
namespace {

using Algorithm = CollectiveAlgorithm;
using Buffer = std::vector<std::byte>;
using Counts = std::vector<std::int64_t>;

// Bytes that each rank sends, every rank's part being `part_bytes`.
template <class Operation>
std::vector<std::int64_t> bytes_sent(const std::vector<int>& nodes, const Operation& operation) {
  std::vector<std::int64_t> sent(nodes.size());
  run_peers(nodes, [&](ThreadPeers& peers) {
    operation(peers);
    sent[static_cast<std::size_t>(peers.rank())] = peers.bytes_sent();
  });
  return sent;
}

std::vector<std::int64_t> bytes_of_all_reduce(Algorithm algorithm, const std::vector<int>& nodes, std::int64_t bytes) {
  return bytes_sent(nodes, [&](ThreadPeers& peers) {
    Buffer data(static_cast<std::size_t>(bytes));
    all_reduce(peers, algorithm, DType::f32, data);
  });
}

TEST(CollectiveTraffic, AllReduceSendsWhatIsWrittenAboutIt) {
  const std::int64_t b = 4 * 840;  // into 2 to 8 parts of whole elements
  for (int ranks = 2; ranks <= 8; ++ranks) {
    const std::vector<int> nodes(static_cast<std::size_t>(ranks), 0);
    const std::vector<std::int64_t> optimal(nodes.size(), 2 * b * (ranks - 1) / ranks);
    EXPECT_EQ(bytes_of_all_reduce(Algorithm::direct, nodes, b), optimal);
    EXPECT_EQ(bytes_of_all_reduce(Algorithm::ring, nodes, b), optimal);
    EXPECT_EQ(bytes_of_all_reduce(Algorithm::hierarchical, nodes, b), optimal);
  }
  EXPECT_EQ(bytes_of_all_reduce(Algorithm::recursive, {0, 0, 0, 0}, b), Counts(4, 2 * b * 3 / 4));
  // Pairs (0, 1) and (2, 3) meet, then 0, 2, 4 and 5 halve and double.
  const std::int64_t of_four = 2 * b * 3 / 4;
  EXPECT_EQ(bytes_of_all_reduce(Algorithm::recursive, {0, 0, 0, 0, 0, 0}, b),
            (Counts{of_four + b, b, of_four + b, b, of_four, of_four}));
  EXPECT_EQ(bytes_of_all_reduce(Algorithm::tree, {0, 0, 0, 0, 0}, b), (Counts{3 * b, b, 2 * b, b, b}));
  // 2 nodes of 2: half of the data to the neighbour and back, half of that half to the other node and back.
  EXPECT_EQ(bytes_of_all_reduce(Algorithm::hierarchical, {0, 0, 1, 1}, b), Counts(4, b + b / 2));
  EXPECT_EQ(bytes_of_all_reduce(Algorithm::hierarchical, {0, 0, 1}, b), (Counts{2 * b, b, b}));
}

TEST(CollectiveTraffic, PartsTravelNoFartherThanNeeded) {
  const std::int64_t part = 4 * 6;
  for (int ranks = 2; ranks <= 8; ++ranks) {
    const std::vector<int> nodes(static_cast<std::size_t>(ranks), 0);
    const Counts counts(nodes.size(), 6), expected(nodes.size(), part * (ranks - 1));
    for (const Algorithm algorithm : {Algorithm::direct, Algorithm::ring, Algorithm::recursive, Algorithm::hierarchical}) {
      if (algorithm == Algorithm::recursive && (ranks & (ranks - 1)) != 0) continue;
      Buffer whole(static_cast<std::size_t>(part * ranks));
      EXPECT_EQ(bytes_sent(nodes,
                           [&](ThreadPeers& peers) {
                             Buffer output(static_cast<std::size_t>(part));
                             reduce_scatter(peers, algorithm, DType::f32, whole, output, counts);
                           }),
                expected)
          << name(algorithm);
      EXPECT_EQ(bytes_sent(nodes,
                           [&](ThreadPeers& peers) {
                             Buffer input(static_cast<std::size_t>(part)), output(whole.size());
                             all_gather(peers, algorithm, DType::f32, input, output, counts);
                           }),
                expected)
          << name(algorithm);
    }
  }
}

TEST(CollectiveTraffic, AnAlgorithmThatDoesNotExistForAnOperationStandsForDirect) {
  EXPECT_FALSE(supports(Algorithm::ring, CollectiveKind::all_to_all));
  EXPECT_FALSE(supports(Algorithm::tree, CollectiveKind::all_gather));
  EXPECT_FALSE(supports(Algorithm::recursive, CollectiveKind::broadcast));
  const auto messages = [](Algorithm algorithm) {
    return bytes_sent({0, 0, 0, 0}, [&](ThreadPeers& peers) {
      Buffer data(64);
      broadcast(peers, algorithm, data, 1);
    });
  };

  EXPECT_EQ(messages(Algorithm::recursive), messages(Algorithm::direct));
  EXPECT_NE(messages(Algorithm::tree), messages(Algorithm::direct));
}

TEST(CollectiveTraffic, RefusesCountsThatAreNotThoseOfTheBuffers) {
  EXPECT_THROW(run_peers({0},
                         [](ThreadPeers& peers) {
                           Buffer input(12), output(12);
                           reduce_scatter(peers, Algorithm::ring, DType::f32, input, output, Counts{2});
                         }),
               ContractError);
  EXPECT_THROW(run_peers({0},
                         [](ThreadPeers& peers) {
                           Buffer data(12);
                           broadcast(peers, Algorithm::direct, data, 1);
                         }),
               ContractError);
}

}  // namespace
}  // namespace tandem::collectives_test

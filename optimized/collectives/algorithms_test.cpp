// SPDX-License-Identifier: Apache-2.0
#include "optimized/collectives/algorithms.h"

#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cpu/sum_in_order.h"
#include "optimized/collectives/collectives_test_support.h"

namespace tandem::collectives_test {
namespace {

using Algorithm = CollectiveAlgorithm;
using Buffer = std::vector<std::byte>;
using Counts = std::vector<std::int64_t>;

constexpr std::array kAlgorithms = {Algorithm::direct, Algorithm::ring, Algorithm::recursive, Algorithm::tree,
                                    Algorithm::hierarchical};
constexpr std::array kDtypes = {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64, DType::u8};

// Every way to lay n ranks out that this file looks at: one node, nodes of two, of three, uneven, one rank each.
std::vector<std::vector<int>> node_layouts(int ranks) {
  std::vector<std::vector<int>> layouts;
  for (const int per_node : {ranks, 2, 3, 1}) {
    std::vector<int> nodes;
    for (int rank = 0; rank < ranks; ++rank) nodes.push_back(rank / per_node);
    if (std::ranges::find(layouts, nodes) == layouts.end()) layouts.push_back(nodes);
  }
  return layouts;
}

// Small integers that differ by rank and by index, so that 9 of them add up exactly in every dtype.
int value_at(int rank, std::int64_t index) { return (rank * 5 + static_cast<int>((index * 3 + rank * index) % 7)) % 14; }

Buffer encoded(DType dtype, std::span<const int> values) {
  Buffer bytes(values.size() * size_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::byte* const to = bytes.data() + i * size_bytes(dtype);
    const auto store = [&](auto value) { std::memcpy(to, &value, sizeof(value)); };
    switch (dtype) {
      case DType::f32: store(static_cast<float>(values[i])); break;
      case DType::f64: store(static_cast<double>(values[i])); break;
      case DType::bf16: store(to_bf16_bits(static_cast<float>(values[i]))); break;
      case DType::f16: store(to_f16_bits(static_cast<float>(values[i]))); break;
      case DType::i64: store(static_cast<std::int64_t>(values[i])); break;
      case DType::i32: store(static_cast<std::int32_t>(values[i])); break;
      default: store(static_cast<std::uint8_t>(values[i])); break;
    }
  }
  return bytes;
}

std::vector<int> values_of(int rank, std::int64_t count) {
  std::vector<int> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(value_at(rank, i));
  return values;
}

std::vector<int> sums_of(int ranks, std::int64_t count) {
  std::vector<int> sums(static_cast<std::size_t>(count), 0);
  for (int rank = 0; rank < ranks; ++rank) {
    for (std::int64_t i = 0; i < count; ++i) sums[static_cast<std::size_t>(i)] += value_at(rank, i);
  }
  return sums;
}

std::int64_t total(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }

// Uneven counts, some of them zero.
Counts uneven_counts(int ranks, int variant) {
  Counts counts;
  for (int rank = 0; rank < ranks; ++rank) counts.push_back((rank * 7 + variant * 3) % 5 * (variant + 1));
  return counts;
}

// A buffer that begins at an odd address, as views into others may.
class Odd {
 public:
  explicit Odd(const Buffer& content) : bytes_(content.size() + 1) { std::ranges::copy(content, bytes_.begin() + 1); }
  explicit Odd(std::size_t size) : bytes_(size + 1, std::byte{0xEE}) {}
  [[nodiscard]] std::span<std::byte> span() { return std::span(bytes_).subspan(1); }
  [[nodiscard]] Buffer content() const { return {bytes_.begin() + 1, bytes_.end()}; }

 private:
  Buffer bytes_;
};

struct Setting {
  std::vector<int> nodes;
  Algorithm algorithm;
  [[nodiscard]] int ranks() const { return static_cast<int>(nodes.size()); }
  [[nodiscard]] std::string text() const {
    std::string result = std::string(name(algorithm)) + ", nodes";
    for (const int node : nodes) result += ' ' + std::to_string(node);
    return result;
  }
};

void for_each_setting(const std::function<void(const Setting&)>& check) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (const Algorithm algorithm : kAlgorithms) {
      const std::vector<std::vector<int>> layouts = node_layouts(ranks);
      const std::size_t used = algorithm == Algorithm::hierarchical ? layouts.size() : 1;
      for (std::size_t i = 0; i < used; ++i) check({layouts[i], algorithm});
    }
  }
}

std::span<std::byte> part_of(std::span<std::byte> whole, const Counts& counts, int rank, DType dtype) {
  const std::size_t width = size_bytes(dtype);
  const auto first = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  return whole.subspan(static_cast<std::size_t>(first) * width,
                       static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)]) * width);
}

Buffer copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

TEST(Collectives, AllReduceAddsEveryRanksElementsInPlace) {
  for_each_setting([](const Setting& setting) {
    for (const DType dtype : kDtypes) {
      for (const std::int64_t count : {0, 1, 2, 5, 31, 257}) {
        const Buffer expected = encoded(dtype, sums_of(setting.ranks(), count));
        run_peers(setting.nodes, [&](ThreadPeers& peers) {
          Odd data(encoded(dtype, values_of(peers.rank(), count)));

          all_reduce(peers, setting.algorithm, dtype, data.span());

          EXPECT_EQ(data.content(), expected) << setting.text() << ", " << name(dtype) << ", " << count << " elements";
        });
      }
    }
  });
}

TEST(Collectives, ReduceScatterLeavesEachRankItsPartOfTheSumAndTheInputAsItWas) {
  for_each_setting([](const Setting& setting) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::i64}) {
      for (const int variant : {0, 1, 4, 12}) {
        const Counts counts = uneven_counts(setting.ranks(), variant);
        Buffer sums = encoded(dtype, sums_of(setting.ranks(), total(counts)));
        run_peers(setting.nodes, [&](ThreadPeers& peers) {
          const Buffer input = encoded(dtype, values_of(peers.rank(), total(counts)));
          Odd given(input);
          Odd output(part_of(sums, counts, peers.rank(), dtype).size());

          reduce_scatter(peers, setting.algorithm, dtype, given.span(), output.span(), counts);

          EXPECT_EQ(output.content(), copy_of(part_of(sums, counts, peers.rank(), dtype))) << setting.text() << ' ' << variant;
          EXPECT_EQ(given.content(), input) << setting.text();
        });
      }
    }
  });
}

TEST(Collectives, ReduceScatterMayLeaveItsPartWhereItLiesInTheInput) {
  for_each_setting([](const Setting& setting) {
    const Counts counts = uneven_counts(setting.ranks(), 2);
    Buffer sums = encoded(DType::f32, sums_of(setting.ranks(), total(counts)));
    run_peers(setting.nodes, [&](ThreadPeers& peers) {
      Buffer data = encoded(DType::f32, values_of(peers.rank(), total(counts)));
      const std::span<std::byte> own = part_of(data, counts, peers.rank(), DType::f32);

      reduce_scatter(peers, setting.algorithm, DType::f32, data, own, counts);

      EXPECT_EQ(copy_of(own), copy_of(part_of(sums, counts, peers.rank(), DType::f32))) << setting.text();
    });
  });
}

TEST(Collectives, AllGatherJoinsThePartsInOrderOfRanks) {
  for_each_setting([](const Setting& setting) {
    for (const DType dtype : {DType::f64, DType::f16, DType::u8}) {
      for (const int variant : {0, 1, 4, 12}) {
        for (const bool in_place : {false, true}) {
          const Counts counts = uneven_counts(setting.ranks(), variant);
          Buffer expected = encoded(dtype, values_of(3, total(counts)));
          run_peers(setting.nodes, [&](ThreadPeers& peers) {
            Odd output(expected.size());
            const std::span<std::byte> place = part_of(output.span(), counts, peers.rank(), dtype);
            Odd input(copy_of(part_of(expected, counts, peers.rank(), dtype)));
            if (in_place) std::ranges::copy(input.span(), place.begin());

            all_gather(peers, setting.algorithm, dtype, in_place ? place : input.span(), output.span(), counts);

            EXPECT_EQ(output.content(), expected) << setting.text() << ' ' << variant << (in_place ? ", in place" : "");
          });
        }
      }
    }
  });
}

TEST(Collectives, AllToAllDeliversEachPairsPart) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    const auto count = [&](int from, int to) { return static_cast<std::int64_t>((from * 3 + to * 5 + from * to) % 4); };
    run_peers(std::vector<int>(static_cast<std::size_t>(ranks), 0), [&](ThreadPeers& peers) {
      Counts send_counts, receive_counts;
      std::vector<int> sent, expected;
      for (int other = 0; other < ranks; ++other) {
        send_counts.push_back(count(peers.rank(), other));
        receive_counts.push_back(count(other, peers.rank()));
        for (int i = 0; i < send_counts.back(); ++i) sent.push_back(peers.rank() * 100 + other * 10 + i);
        for (int i = 0; i < receive_counts.back(); ++i) expected.push_back(other * 100 + peers.rank() * 10 + i);
      }
      const Buffer input = encoded(DType::i32, sent);
      Buffer output(expected.size() * 4);

      all_to_all(peers, Algorithm::direct, DType::i32, input, send_counts, output, receive_counts);

      EXPECT_EQ(output, encoded(DType::i32, expected)) << ranks << " ranks, rank " << peers.rank();
    });
  }
}

TEST(Collectives, BroadcastGivesEveryRankTheRootsBytes) {
  for_each_setting([](const Setting& setting) {
    for (int root = 0; root < setting.ranks(); ++root) {
      for (const std::size_t size : {0U, 1U, 5U, 1021U}) {
        Buffer expected(size);
        for (std::size_t i = 0; i < size; ++i) expected[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(root) * 3);
        run_peers(setting.nodes, [&](ThreadPeers& peers) {
          Buffer data = peers.rank() == root ? expected : Buffer(size, std::byte{0x11});

          broadcast(peers, setting.algorithm, data, root);

          EXPECT_EQ(data, expected) << setting.text() << ", root " << root << ", " << size << " bytes";
        });
      }
    }
  });
}

TEST(Collectives, NobodyLeavesABarrierBeforeAllHaveCome) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    std::atomic<int> come{0};
    run_peers(std::vector<int>(static_cast<std::size_t>(ranks), 0), [&](ThreadPeers& peers) {
      for (int round = 1; round <= 20; ++round) {
        ++come;
        barrier(peers);
        EXPECT_GE(come.load(), round * ranks);
        barrier(peers);
      }
    });
  }
}

// Values of widely different sizes, whose sum depends on the order of addition.
std::vector<float> rough_values(int rank, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto exponent = static_cast<int>((i * 13 + static_cast<std::size_t>(rank) * 29) % 23) - 11;
    values[i] = std::ldexp(1.0F + 0.013F * static_cast<float>((i * 31 + static_cast<std::size_t>(rank) * 17) % 71), exponent);
    if ((i + static_cast<std::size_t>(rank)) % 3 == 0) values[i] = -values[i];
  }
  return values;
}

Buffer rough_bytes(DType dtype, int rank, std::size_t count) {
  const std::vector<float> values = rough_values(rank, count);
  Buffer bytes(count * size_bytes(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t half = to_bf16_bits(values[i]);
    std::memcpy(bytes.data() + i * size_bytes(dtype), dtype == DType::bf16 ? static_cast<const void*>(&half) : &values[i],
                size_bytes(dtype));
  }
  return bytes;
}

Buffer sum_in_rank_order(DType dtype, int ranks, std::size_t count) {
  std::vector<Buffer> inputs;
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < ranks; ++rank) inputs.push_back(rough_bytes(dtype, rank, count));
  for (const Buffer& input : inputs) sources.push_back(input.data());
  Buffer sum(count * size_bytes(dtype));
  const std::array<std::byte*, 1> destinations = {sum.data()};
  sum_in_order(dtype, sources, destinations, static_cast<std::int64_t>(count));
  return sum;
}

std::vector<Buffer> all_reduced(const Setting& setting, DType dtype, std::size_t count) {
  std::vector<Buffer> results(setting.nodes.size());
  run_peers(setting.nodes, [&](ThreadPeers& peers) {
    Buffer data = rough_bytes(dtype, peers.rank(), count);
    all_reduce(peers, setting.algorithm, dtype, data);
    results[static_cast<std::size_t>(peers.rank())] = data;
  });
  return results;
}

TEST(Collectives, DirectAddsInTheOrderOfRanksToTheLastBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (int ranks = 2; ranks <= 9; ++ranks) {
      const Buffer expected = sum_in_rank_order(dtype, ranks, 509);

      const std::vector<Buffer> results =
          all_reduced({std::vector<int>(static_cast<std::size_t>(ranks), 0), Algorithm::direct}, dtype, 509);

      for (const Buffer& result : results) EXPECT_EQ(result, expected) << ranks << " ranks, " << name(dtype);
    }
  }
}

TEST(Collectives, EveryAlgorithmGivesTheSameBitsOnEveryRankAndInEveryRun) {
  for_each_setting([](const Setting& setting) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const std::vector<Buffer> first = all_reduced(setting, dtype, 509);
      for (const Buffer& result : first) EXPECT_EQ(result, first[0]) << setting.text();
      EXPECT_EQ(all_reduced(setting, dtype, 509), first) << setting.text();
    }
  });
}

TEST(Collectives, TheseValuesTellOneOrderOfAdditionFromAnother) {
  const std::vector<int> nodes(5, 0);

  EXPECT_NE(all_reduced({nodes, Algorithm::ring}, DType::f32, 509)[0],
            all_reduced({nodes, Algorithm::direct}, DType::f32, 509)[0]);
}

PitfallSet planted(Pitfall pitfall) { return PitfallSet(std::span(&pitfall, 1)); }

TEST(Collectives, PlantedFaultsShow) {
  const auto sum_of = [](Pitfall pitfall, Algorithm algorithm, const std::vector<int>& nodes) {
    std::vector<Buffer> results(nodes.size());
    run_peers(
        nodes,
        [&](ThreadPeers& peers) {
          Buffer data = encoded(DType::i32, values_of(peers.rank(), 31));
          all_reduce(peers, algorithm, DType::i32, data);
          results[static_cast<std::size_t>(peers.rank())] = data;
        },
        planted(pitfall));
    return results;
  };
  const std::vector<Buffer> right(4, encoded(DType::i32, sums_of(4, 31)));

  EXPECT_EQ(sum_of(Pitfall::collective_parts_swapped, Algorithm::ring, {0, 0, 0, 0}), right);
  EXPECT_NE(sum_of(Pitfall::ring_step_off_by_one, Algorithm::ring, {0, 0, 0, 0}), right);
  EXPECT_NE(sum_of(Pitfall::small_message_protocol_stale, Algorithm::direct, {0, 0, 0, 0}), right);
  EXPECT_NE(sum_of(Pitfall::hierarchical_counts_leader_twice, Algorithm::hierarchical, {0, 0, 1, 1}), right);
  EXPECT_NE(sum_of(Pitfall::hierarchical_counts_leader_twice, Algorithm::hierarchical, {0, 1, 1, 1}), right);
}

TEST(Collectives, SwappedPartsShowInAnAllGather) {
  run_peers(
      {0, 0, 0},
      [](ThreadPeers& peers) {
        const Buffer input(1, static_cast<std::byte>(peers.rank()));
        Buffer output(3);
        all_gather(peers, Algorithm::direct, DType::u8, input, output, Counts{1, 1, 1});
        EXPECT_EQ(output, (Buffer{std::byte{1}, std::byte{0}, std::byte{2}}));
      },
      planted(Pitfall::collective_parts_swapped));
}

}  // namespace
}  // namespace tandem::collectives_test

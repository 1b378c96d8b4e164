// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include "optimized/comm/comm_test_support.h"

namespace tandem::comm_test {
namespace {

class Collectives : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, Collectives, testing::Combine(kBothWays, testing::Values(1, 2, 3, 4, 7)), param_name);

// 0, 1, fewer than ranks, primes, more than one unit of work per rank.
const std::vector<std::int64_t> kSizes = {0, 1, 3, 5, 31, 1009, 65537, 400009};

template <class T>
void expect_sum_of_all(const std::vector<T>& got, int ranks, std::int64_t count, const char* what) {
  for (std::int64_t i = 0; i < count; ++i) {
    T expected{};
    for (int rank = 0; rank < ranks; ++rank) expected = static_cast<T>(expected + static_cast<T>(value_at(rank, i)));
    ASSERT_EQ(got[static_cast<std::size_t>(i)], expected) << what << " element " << i << " of " << count;
  }
}

template <class T>
void check_all_reduce(Communicator& comm, std::int64_t count) {
  std::vector<T> data = values_of<T>(comm.rank(), count);
  all_reduce(comm, flat_view(data), {.name = "data"});
  expect_sum_of_all(data, comm.size(), count, std::string(name(dtype_of<T>)).c_str());
}

TEST_P(Collectives, AllReduceSumsEveryElementOfEveryRank) {
  run_ranks(ranks(), [&](Communicator& comm) {
    for (const std::int64_t count : kSizes) check_all_reduce<float>(comm, count);
  });
}

TEST_P(Collectives, AllReduceWorksInEveryPlainDtype) {
  run_ranks(ranks(), [&](Communicator& comm) {
    check_all_reduce<double>(comm, 70001);
    check_all_reduce<std::int64_t>(comm, 70001);
    check_all_reduce<std::int32_t>(comm, 70001);
    check_all_reduce<std::uint16_t>(comm, 70001);
    check_all_reduce<std::int8_t>(comm, 70001);  // wraps around
    check_all_reduce<std::uint8_t>(comm, 70001);
  });
}

TEST_P(Collectives, AllReduceOfMisalignedBuffersLeavesTheirNeighboursAlone) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const std::int64_t count = 40009;
    // Odd addresses, different ones on each rank.
    const auto shift = static_cast<std::size_t>(1 + comm.rank() % 5);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count) * sizeof(float) + 16, 0xA5);
    std::vector<float> values = values_of<float>(comm.rank(), count);
    std::memcpy(bytes.data() + shift, values.data(), values.size() * sizeof(float));

    all_reduce(comm, TensorView(bytes.data() + shift, DType::f32, {count}), {});

    std::memcpy(values.data(), bytes.data() + shift, values.size() * sizeof(float));
    expect_sum_of_all(values, comm.size(), count, "misaligned");
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (i < shift || i >= shift + values.size() * sizeof(float)) {
        ASSERT_EQ(bytes[i], 0xA5) << "byte " << i;
      }
    }
  });
}

// Part r has r' = (r * 5 + 3) % 7 times 1000 elements: some are empty.
std::vector<std::int64_t> uneven_counts(int ranks, std::int64_t scale) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < ranks; ++rank) counts.push_back((rank * 5 + 4) % 7 * scale + (rank % 2));
  if (ranks > 2) counts[1] = 0;
  return counts;
}

TEST_P(Collectives, ReduceScatterGivesEachRankItsPartOfTheSum) {
  run_ranks(ranks(), [&](Communicator& comm) {
    for (const std::int64_t scale : {0, 1, 997, 50021}) {
      const std::vector<std::int64_t> counts = uneven_counts(comm.size(), scale);
      std::vector<float> input = values_of<float>(comm.rank(), total_of(counts));
      const std::vector<float> before = input;
      std::vector<float> output(static_cast<std::size_t>(counts[static_cast<std::size_t>(comm.rank())]), -1.0F);

      comm.reduce_scatter(flat_view(input), flat_view(output), counts, {}).wait_host();

      const std::int64_t first = std::accumulate(counts.begin(), counts.begin() + comm.rank(), std::int64_t{0});
      for (std::size_t i = 0; i < output.size(); ++i) {
        float expected = 0;
        for (int rank = 0; rank < comm.size(); ++rank) {
          expected += static_cast<float>(value_at(rank, first + static_cast<std::int64_t>(i)));
        }
        ASSERT_EQ(output[i], expected) << "rank " << comm.rank() << " element " << i << " scale " << scale;
      }
      EXPECT_EQ(input, before);
    }
  });
}

TEST_P(Collectives, ReduceScatterMayPutTheResultAtItsPlaceInTheInput) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const std::vector<std::int64_t> counts = uneven_counts(comm.size(), 1009);
    std::vector<double> input = values_of<double>(comm.rank(), total_of(counts));
    const std::int64_t first = std::accumulate(counts.begin(), counts.begin() + comm.rank(), std::int64_t{0});
    const std::int64_t own = counts[static_cast<std::size_t>(comm.rank())];

    comm.reduce_scatter(flat_view(input), flat_view(input).flat(first, own), counts, {}).wait_host();

    for (std::int64_t i = 0; i < total_of(counts); ++i) {
      double expected = static_cast<double>(value_at(comm.rank(), i));
      if (i >= first && i < first + own) {
        expected = 0;
        for (int rank = 0; rank < comm.size(); ++rank) expected += static_cast<double>(value_at(rank, i));
      }
      ASSERT_EQ(input[static_cast<std::size_t>(i)], expected) << "element " << i;
    }
  });
}

void expect_gathered(const std::vector<float>& output, const std::vector<std::int64_t>& counts) {
  std::size_t position = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    for (std::int64_t i = 0; i < counts[rank]; ++i) {
      ASSERT_EQ(output[position++], static_cast<float>(value_at(static_cast<int>(rank), i)))
          << "part " << rank << " element " << i;
    }
  }
}

TEST_P(Collectives, AllGatherConcatenatesInRankOrder) {
  run_ranks(ranks(), [&](Communicator& comm) {
    for (const std::int64_t scale : {0, 1, 997, 50021}) {
      const std::vector<std::int64_t> counts = uneven_counts(comm.size(), scale);
      std::vector<float> input = values_of<float>(comm.rank(), counts[static_cast<std::size_t>(comm.rank())]);
      std::vector<float> output(static_cast<std::size_t>(total_of(counts)), -1.0F);

      comm.all_gather(flat_view(input), flat_view(output), counts, {}).wait_host();

      expect_gathered(output, counts);
    }
  });
}

TEST_P(Collectives, AllGatherTakesAnInputAtItsPlaceInTheOutput) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const std::vector<std::int64_t> counts = uneven_counts(comm.size(), 20011);
    const std::int64_t own = counts[static_cast<std::size_t>(comm.rank())];
    const std::int64_t first = std::accumulate(counts.begin(), counts.begin() + comm.rank(), std::int64_t{0});
    std::vector<float> output(static_cast<std::size_t>(total_of(counts)), -1.0F);
    const std::vector<float> values = values_of<float>(comm.rank(), own);
    std::copy(values.begin(), values.end(), output.begin() + first);

    comm.all_gather(flat_view(output).flat(first, own), flat_view(output), counts, {}).wait_host();

    expect_gathered(output, counts);
  });
}

// Elements from rank `from` to rank `to`: uneven, with zeros.
std::int64_t exchanged(int from, int to, std::int64_t scale) { return (from * 3 + to * 5) % 4 * scale; }

TEST_P(Collectives, AllToAllDeliversEveryPartToItsReceiver) {
  run_ranks(ranks(), [&](Communicator& comm) {
    for (const std::int64_t scale : {0, 1, 1009, 30011}) {
      std::vector<std::int64_t> sends, receives;
      for (int peer = 0; peer < comm.size(); ++peer) {
        sends.push_back(exchanged(comm.rank(), peer, scale));
        receives.push_back(exchanged(peer, comm.rank(), scale));
      }
      std::vector<std::int32_t> input, output(static_cast<std::size_t>(total_of(receives)), -1);
      for (int peer = 0; peer < comm.size(); ++peer) {
        for (std::int64_t i = 0; i < exchanged(comm.rank(), peer, scale); ++i) {
          input.push_back(static_cast<std::int32_t>(value_at(comm.rank(), i) * 10 + peer));
        }
      }

      comm.all_to_all(flat_view(input), sends, flat_view(output), receives, {}).wait_host();

      std::size_t position = 0;
      for (int peer = 0; peer < comm.size(); ++peer) {
        for (std::int64_t i = 0; i < exchanged(peer, comm.rank(), scale); ++i) {
          ASSERT_EQ(output[position++], value_at(peer, i) * 10 + comm.rank()) << "from " << peer << " element " << i;
        }
      }
    }
  });
}

TEST_P(Collectives, BroadcastCopiesTheRootToAll) {
  run_ranks(ranks(), [&](Communicator& comm) {
    for (const std::int64_t count : kSizes) {
      for (int root = 0; root < comm.size(); ++root) {
        std::vector<float> data = values_of<float>(comm.rank(), count);
        comm.broadcast(flat_view(data), root, {}).wait_host();
        ASSERT_EQ(data, values_of<float>(root, count)) << "root " << root;
      }
    }
  });
}

TEST_P(Collectives, HostValuesAreSummedAndGathered) {
  run_ranks(ranks(), [&](Communicator& comm) {
    double expected = 0;
    std::vector<std::uint64_t> all;
    for (int rank = 0; rank < comm.size(); ++rank) {
      expected += 0.25 * (rank + 1);
      all.push_back(0xFFFFFFFFFFFFFF00U + static_cast<std::uint64_t>(rank));
    }
    EXPECT_EQ(all_reduce_sum(comm, 0.25 * (comm.rank() + 1)), expected);
    EXPECT_EQ(all_gather_u64(comm, 0xFFFFFFFFFFFFFF00U + static_cast<std::uint64_t>(comm.rank())), all);
  });
}

TEST_P(Collectives, BarrierLetsNobodyPassBeforeAllHaveCome) {
  std::atomic<int> arrived{0};
  run_ranks(ranks(), [&](Communicator& comm) {
    for (int round = 1; round <= 200; ++round) {
      arrived.fetch_add(1);
      comm.barrier();
      EXPECT_GE(arrived.load(), round * comm.size());
      comm.barrier();
    }
  });
}

TEST_P(Collectives, SplitOrdersByKeyThenRank) {
  run_ranks(ranks(), [&](Communicator& comm) {
    // Odd and even ranks apart, odd ones in reverse order.
    const int colour = comm.rank() % 2;
    const std::unique_ptr<Communicator> part = comm.split(colour, colour == 1 ? -comm.rank() : 0);

    std::vector<std::uint64_t> expected;
    for (int rank = 0; rank < comm.size(); ++rank) {
      if (rank % 2 == colour) expected.push_back(static_cast<std::uint64_t>(rank));
    }
    if (colour == 1) std::reverse(expected.begin(), expected.end());
    EXPECT_EQ(all_gather_u64(*part, static_cast<std::uint64_t>(comm.rank())), expected);
    EXPECT_EQ(expected[static_cast<std::size_t>(part->rank())], static_cast<std::uint64_t>(comm.rank()));
    EXPECT_EQ(part->generation(), comm.generation());
  });
}

TEST_P(Collectives, PartsOfASplitCommunicateAtTheSameTime) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> part = comm.split(comm.rank() % 2, 0);
    for (int round = 0; round < 50; ++round) {
      const double sum = all_reduce_sum(*part, comm.rank() + round);
      double expected = 0;
      for (int rank = comm.rank() % 2; rank < comm.size(); rank += 2) expected += rank + round;
      ASSERT_EQ(sum, expected);
    }
    comm.barrier();
  });
}

TEST_P(Collectives, BytesSentAreThoseOfTheAlgorithm) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const std::int64_t n = comm.size();
    const std::int64_t elements = 4 * n * 100;
    std::vector<float> data(static_cast<std::size_t>(elements), 1.0F);
    all_reduce(comm, flat_view(data), {.purpose = Purpose::gradient});
    EXPECT_EQ(comm.bytes_sent(Purpose::gradient), 2 * (n - 1) * elements * 4 / n);

    const std::vector<std::int64_t> counts(static_cast<std::size_t>(n), 400);
    std::vector<float> part(400);
    comm.all_gather(flat_view(part), flat_view(data), counts, {.purpose = Purpose::parameter}).wait_host();
    EXPECT_EQ(comm.bytes_sent(Purpose::parameter), (n - 1) * 1600);
    comm.reduce_scatter(flat_view(data), flat_view(part), counts, {.purpose = Purpose::parameter}).wait_host();
    EXPECT_EQ(comm.bytes_sent(Purpose::parameter), 2 * (n - 1) * 1600);
    EXPECT_EQ(comm.bytes_sent(Purpose::activation), 0);
  });
}

TEST_P(Collectives, ALaterWorldHasAHigherGeneration) {
  std::uint64_t first = 0;
  run_ranks(ranks(), [&](Communicator& comm) {
    if (comm.rank() == 0) first = comm.generation();
  });
  run_ranks(ranks(), [&](Communicator& comm) { EXPECT_GT(comm.generation(), first); });
}

TEST(OneRank, RunsOnTheCallingThread) {
  const auto caller = std::this_thread::get_id();
  run_world({.ranks = 1}, [&](Communicator& comm) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(comm.size(), 1);
  });
}

// Sums whose value depends on the order: large and small terms of both signs.
template <class T>
T rough_value(int rank, std::int64_t index) {
  const double sign = (rank + index) % 2 == 0 ? 1.0 : -1.0;
  return static_cast<T>(sign * std::ldexp(1.0 + 0.37 * rank + 0.001 * static_cast<double>(index % 101), (rank * 7 + 3) % 24));
}

template <class T>
void expect_declared_order(int ranks, Way way, std::int64_t count) {
  run_ranks(ranks, way, [&](Communicator& comm) {
    std::vector<T> data(static_cast<std::size_t>(count)), expected(data.size()), reversed(data.size());
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      data[at] = rough_value<T>(comm.rank(), i);
      expected[at] = rough_value<T>(0, i);
      reversed[at] = rough_value<T>(ranks - 1, i);
      for (int rank = 1; rank < ranks; ++rank) expected[at] += rough_value<T>(rank, i);
      for (int rank = ranks - 2; rank >= 0; --rank) reversed[at] += rough_value<T>(rank, i);
    }
    ASSERT_TRUE(ranks <= 2 || expected != reversed) << "these values cannot tell the order";

    all_reduce(comm, flat_view(data), {});

    ASSERT_EQ(std::memcmp(data.data(), expected.data(), data.size() * sizeof(T)), 0) << "rank " << comm.rank();
  });
}

TEST_P(Collectives, AllReduceAddsInRankOrder) {
  for (const std::int64_t count : {7, 4099, 200003}) {
    expect_declared_order<float>(ranks(), way(), count);
    expect_declared_order<double>(ranks(), way(), count);
  }
}

}  // namespace
}  // namespace tandem::comm_test

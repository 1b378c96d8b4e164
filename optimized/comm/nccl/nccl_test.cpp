// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <numeric>
#include <thread>

#include "core/batch.h"
#include "core/error.h"
#include "kernels/cpu/sum_in_order.h"
#include "kernels/kernels.h"
#include "optimized/comm/comm_test_support.h"
#include "optimized/comm/nccl/nccl_fake_test_support.h"

namespace tandem::nccl_test {
namespace {

using namespace std::chrono_literals;
using comm_test::contains;
using comm_test::text_of;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// Numbers whose sum depends on the order in which they are added.
std::vector<float> numbers_of(int rank, std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(1 + (static_cast<int>(i) * 37 + rank * 101) % 97) * (rank % 2 == 0 ? 1.0F : 1e-7F);
  }
  return values;
}

// sum over ranks, in their order.
std::vector<float> sum_of(int ranks, std::int64_t count) {
  std::vector<float> sum = numbers_of(0, count);
  for (int rank = 1; rank < ranks; ++rank) {
    const std::vector<float> next = numbers_of(rank, count);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += next[i];
  }
  return sum;
}

// A tensor of floats on the device of a rank.
class OnDevice {
 public:
  OnDevice(Memory& lane, const std::vector<float>& values) : lane_(lane), count_(values.size()) {
    address_ = lane.reserve(bytes());
    lane.write(values.data(), address_, static_cast<std::int64_t>(count_ * sizeof(float)));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { lane_.give_back(address_, bytes()); }

  [[nodiscard]] TensorView view() const { return {address_, DType::f32, {static_cast<std::int64_t>(count_)}}; }
  [[nodiscard]] TensorView part(std::int64_t begin, std::int64_t count) const {
    return {static_cast<float*>(address_) + begin, DType::f32, {count}};
  }
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> values(count_);
    lane_.read(address_, values.data(), static_cast<std::int64_t>(count_ * sizeof(float)));
    return values;
  }

 private:
  [[nodiscard]] std::int64_t bytes() const { return static_cast<std::int64_t>(std::max<std::size_t>(count_, 1) * sizeof(float)); }
  Memory& lane_;
  std::size_t count_;
  void* address_;
};

std::vector<float> slice(const std::vector<float>& values, std::int64_t begin, std::int64_t count) {
  return {values.begin() + begin, values.begin() + begin + count};
}

class Nccl : public testing::TestWithParam<int> {
 protected:
  [[nodiscard]] static int ranks() { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(World, Nccl, testing::Values(1, 2, 3, 4), comm_test::ranks_name);

TEST_P(Nccl, AllReduceOfTheDevicesTensorsIsTheDefinitionBitForBit) {
  const FakeNccl nccl;
  run_fake_world({.ranks = ranks()}, [](Communicator& comm, Memory& lane) {
    const OnDevice data(lane, numbers_of(comm.rank(), 103));
    comm.all_reduce(data.view(), {.purpose = Purpose::gradient}).wait_host();
    EXPECT_EQ(data.values(), sum_of(comm.size(), 103));
    std::vector<float> host = numbers_of(comm.rank(), 17);
    all_reduce(comm, comm_test::flat_view(host), {});
    EXPECT_EQ(host, sum_of(comm.size(), 17));
    const std::int64_t own = balanced_part(103, comm.size(), comm.rank()).size();
    EXPECT_EQ(comm.bytes_sent(Purpose::gradient), 4 * (103 - own + own * (comm.size() - 1)));
  });
}

TEST_P(Nccl, SumsInTheOrderOfRanksAreToldByTheirAlgorithm) {
  const FakeNccl nccl;
  run_fake_world({.ranks = ranks()}, [](Communicator& comm, Memory& lane) {
    const OnDevice data(lane, numbers_of(comm.rank(), 10));
    comm.all_reduce(data.view(), {.algorithm = CollectiveAlgorithm::direct}).wait_host();
    EXPECT_EQ(data.values(), sum_of(comm.size(), 10));
    EXPECT_THROW(static_cast<void>(comm.all_reduce(data.view(), {.algorithm = CollectiveAlgorithm::ring})), ContractError);
  });
}

// Rank r has r + `first` elements, none of the last rank where first is 0 and so on.
std::vector<std::int64_t> uneven_counts(int ranks, int first) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < ranks; ++rank) counts.push_back((rank * 3 + first) % 5);
  return counts;
}

TEST_P(Nccl, ReduceScatterTakesEqualAndUnequalParts) {
  const FakeNccl nccl;
  run_fake_world({.ranks = ranks()}, [](Communicator& comm, Memory& lane) {
    for (const auto& counts : {std::vector<std::int64_t>(at(comm.size()), 6), uneven_counts(comm.size(), 2)}) {
      for (const auto algorithm : {CollectiveAlgorithm::automatic, CollectiveAlgorithm::direct}) {
        const std::int64_t total = comm_test::total_of(counts);
        const std::int64_t begin = std::accumulate(counts.begin(), counts.begin() + comm.rank(), std::int64_t{0});
        const std::int64_t own = counts[at(comm.rank())];
        const OnDevice input(lane, numbers_of(comm.rank(), total));
        const OnDevice output(lane, std::vector<float>(static_cast<std::size_t>(own), -1));
        comm.reduce_scatter(input.view(), output.view(), counts, {.algorithm = algorithm}).wait_host();
        const std::vector<float> expected = slice(sum_of(comm.size(), total), begin, own);
        EXPECT_EQ(output.values(), expected);
        // In place.
        comm.reduce_scatter(input.view(), input.part(begin, own), counts, {.algorithm = algorithm}).wait_host();
        EXPECT_EQ(slice(input.values(), begin, own), expected);
      }
    }
  });
}

TEST_P(Nccl, AllGatherTakesEqualAndUnequalParts) {
  const FakeNccl nccl;
  run_fake_world({.ranks = ranks()}, [](Communicator& comm, Memory& lane) {
    for (const auto& counts : {std::vector<std::int64_t>(at(comm.size()), 6), uneven_counts(comm.size(), 3)}) {
      std::vector<float> expected;
      for (int rank = 0; rank < comm.size(); ++rank) {
        for (const float value : numbers_of(rank, counts[at(rank)])) expected.push_back(value);
      }
      const OnDevice input(lane, numbers_of(comm.rank(), counts[at(comm.rank())]));
      const OnDevice output(lane, std::vector<float>(expected.size(), -1));
      comm.all_gather(input.view(), output.view(), counts, {}).wait_host();
      EXPECT_EQ(output.values(), expected);
    }
    EXPECT_EQ(all_gather_u64(comm, static_cast<std::uint64_t>(comm.rank()) + 7).back(),
              static_cast<std::uint64_t>(comm.size()) + 6);
  });
}

TEST_P(Nccl, AllToAllAndBroadcastMoveWhatTheySay) {
  const FakeNccl nccl;
  run_fake_world({.ranks = ranks()}, [](Communicator& comm, Memory& lane) {
    // Rank a sends a + 2 b elements to rank b.
    std::vector<std::int64_t> sent, received;
    std::vector<float> expected;
    for (int other = 0; other < comm.size(); ++other) {
      sent.push_back(comm.rank() + 2 * other);
      received.push_back(other + 2 * comm.rank());
      std::int64_t begin = 0;
      for (int before = 0; before < comm.rank(); ++before) begin += other + 2 * before;
      for (const float value : slice(numbers_of(other, 100), begin, received.back())) expected.push_back(value);
    }
    const OnDevice input(lane, numbers_of(comm.rank(), comm_test::total_of(sent)));
    const OnDevice output(lane, std::vector<float>(expected.size(), -1));
    comm.all_to_all(input.view(), sent, output.view(), received, {}).wait_host();
    EXPECT_EQ(output.values(), expected);
    const int root = comm.size() - 1;
    const OnDevice data(lane, numbers_of(comm.rank(), 9));
    comm.broadcast(data.view(), root, {}).wait_host();
    EXPECT_EQ(data.values(), numbers_of(root, 9));
    std::vector<float> host = numbers_of(comm.rank(), 5);
    comm.broadcast(comm_test::flat_view(host), root, {}).wait_host();
    EXPECT_EQ(host, numbers_of(root, 5));
  });
}

TEST_P(Nccl, ALaneSeesTheResultsOfWhatItWaitedForAndItsOwnWorkComesFirst) {
  const FakeNccl nccl;
  run_fake_world({.ranks = ranks()}, [](Communicator& comm, Memory& lane) {
    const OnDevice data(lane, std::vector<float>(50, 0)), source(lane, numbers_of(comm.rank(), 50)),
        target(lane, std::vector<float>(50, 0));
    // The lane is late: what it writes before the call must be in the sum.
    std::latch gate(1);
    enqueue(lane, [&](Memory&) { gate.wait(); });
    lane.copy(source.view().data(), data.view().data(), 200);
    Work work = comm.all_reduce(data.view(), {});
    EXPECT_FALSE(work.done());
    work.wait_host();
    // An operation that did not wait for the lane would be done by now.
    std::this_thread::sleep_for(20ms);
    gate.count_down();
    lane.copy(data.view().data(), target.view().data(), 200);
    lane.set_bytes(data.view().data(), 0, 200);
    EXPECT_EQ(target.values(), sum_of(comm.size(), 50));
  });
}

TEST_P(Nccl, ASplitHasItsOwnRanksAndBytes) {
  const FakeNccl nccl;
  run_fake_world({.ranks = ranks()}, [](Communicator& comm, Memory& lane) {
    // Negative colours too; in reverse order of ranks.
    const std::unique_ptr<Communicator> part = comm.split(-(comm.rank() % 2), -comm.rank());
    const int members = (comm.size() + 1 - comm.rank() % 2) / 2;
    EXPECT_EQ(part->size(), members);
    EXPECT_EQ(part->rank(), members - 1 - comm.rank() / 2);
    const OnDevice data(lane, {static_cast<float>(comm.rank() + 1)});
    part->all_reduce(data.view(), {}).wait_host();
    float sum = 0;
    for (int rank = comm.rank() % 2; rank < comm.size(); rank += 2) sum += static_cast<float>(rank + 1);
    EXPECT_EQ(data.values(), std::vector<float>{sum});
    const std::unique_ptr<Communicator> again = part->split(0, 0);
    EXPECT_EQ(again->rank(), part->rank());
    again->barrier();
    comm.barrier();
  });
}

TEST_P(Nccl, MessagesOfAllRanksInAnyOrderOfPostingDoNotBlock) {
  const FakeNccl nccl;
  run_fake_world({.ranks = ranks()}, [](Communicator& comm, Memory& lane) {
    if (comm.size() == 1) return;
    const int next = (comm.rank() + 1) % comm.size(), previous = (comm.rank() + comm.size() - 1) % comm.size();
    const OnDevice to_next(lane, numbers_of(comm.rank(), 40)), to_previous(lane, numbers_of(comm.rank() + 10, 40));
    const OnDevice from_next(lane, std::vector<float>(40)), from_previous(lane, std::vector<float>(40));
    // Every rank sends before it receives, and the receives come in another order than the sends.
    Work works[] = {comm.send(to_next.view(), next, {.step = 1}, {}), comm.send(to_previous.view(), previous, {.step = 2}, {}),
                    comm.recv(from_next.view(), next, {.step = comm.size() == 2 ? 1 : 2}, {}),
                    comm.recv(from_previous.view(), previous, {.step = comm.size() == 2 ? 2 : 1}, {})};
    for (Work& work : works) work.wait_host();
    const bool pair = comm.size() == 2;
    EXPECT_EQ(from_next.values(), numbers_of(pair ? next : next + 10, 40));
    EXPECT_EQ(from_previous.values(), numbers_of(pair ? previous + 10 : previous, 40));
    std::vector<float> host = numbers_of(comm.rank(), 3), got(3);
    Work send = comm.send(comm_test::flat_view(host), next, {}, {.purpose = Purpose::activation});
    comm.recv(comm_test::flat_view(got), previous, {}, {}).wait_host();
    send.wait_host();
    EXPECT_EQ(got, numbers_of(previous, 3));
    EXPECT_EQ(comm.bytes_sent(Purpose::activation), 12);
  });
}

TEST(NcclOnTheEmulatedGpu, CollectivesAndMessagesMoveWhatIsInItsMemory) {
  if (const std::string why = why_no_gpu("simt"); !why.empty()) GTEST_SKIP() << why;
  const FakeNccl nccl;
  run_fake_world({.ranks = 3, .emulated_gpu = true}, [](Communicator& comm, Memory& lane) {
    const OnDevice data(lane, numbers_of(comm.rank(), 100)), gathered(lane, std::vector<float>(30)),
        got(lane, std::vector<float>(7));
    comm.all_reduce(data.view(), {.algorithm = CollectiveAlgorithm::direct}).wait_host();
    comm.all_gather(data.part(10 * comm.rank(), 10), gathered.view(), std::vector<std::int64_t>{10, 10, 10}, {}).wait_host();
    Work send = comm.send(data.part(0, 7), (comm.rank() + 1) % 3, {}, {});
    comm.recv(got.view(), (comm.rank() + 2) % 3, {}, {}).wait_host();
    send.wait_host();
    EXPECT_EQ(all_reduce_sum(comm, comm.rank() + 1.0), 6.0);
    EXPECT_EQ(gathered.values(), slice(sum_of(3, 100), 0, 30));
    EXPECT_EQ(got.values(), slice(sum_of(3, 100), 0, 7));
  });
}

TEST(NcclMessages, AnotherEnvelopeOrSizeThanExpectedIsNamedOnBothRanks) {
  for (const bool other_size : {false, true}) {
    const FakeNccl nccl;
    std::atomic<int> told{0};
    run_fake_world({.ranks = 2}, [&](Communicator& comm, Memory& lane) {
      const OnDevice data(lane, std::vector<float>(comm.rank() == 1 && other_size ? 5 : 4, 1.0F));
      const Envelope envelope{.step = 3, .micro_batch = comm.rank() == 1 && !other_size ? 2 : 1};
      const std::string text = text_of<ContractError>([&] {
        if (comm.rank() == 0) {
          Work work = comm.send(data.view(), 1, envelope, {.name = "activations"});
          work.wait_host();
          comm.barrier();
        } else {
          comm.recv(data.view(), 0, envelope, {.name = "x"}).wait_host();
        }
      });
      EXPECT_TRUE(contains(text, "send 'activations' of 4 fp32 from rank 0 to rank 1 (step 3, micro-batch 1")) << text;
      EXPECT_TRUE(contains(text, other_size ? "recv 'x' of 5 fp32" : "(step 3, micro-batch 2")) << text;
      EXPECT_EQ(data.values()[0], 1.0F);
      told.fetch_add(1);
    });
    EXPECT_EQ(told.load(), 2);
  }
}

}  // namespace
}  // namespace tandem::nccl_test

// SPDX-License-Identifier: Apache-2.0
// Runs under mpirun, with any number of processes; every process runs every test.
#include "optimized/comm/mpi/mpi_wire.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "core/error.h"
#include "optimized/comm/mpi/mpi_job.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>(i * 31 + static_cast<std::size_t>(seed) * 7 + (i >> 8));
  return bytes;
}

std::chrono::steady_clock::time_point soon() { return std::chrono::steady_clock::now() + 20s; }

// A world of all processes, as run_world makes it.
class MpiWireTest : public testing::Test {
 protected:
  void SetUp() override {
    comm_ = MpiJob::get().first_processes(MpiJob::get().shape().processes);
    wire_ = std::make_unique<MpiWire>(comm_, [this] { return failed_.load(); });
  }
  void TearDown() override {
    MPI_Barrier(comm_);
    wire_.reset();
    MPI_Comm_free(&comm_);
  }
  [[nodiscard]] int rank() const { return wire_->rank(); }
  [[nodiscard]] int ranks() const { return wire_->ranks(); }
  [[nodiscard]] int next() const { return (rank() + 1) % ranks(); }
  [[nodiscard]] int previous() const { return (rank() + ranks() - 1) % ranks(); }

  std::atomic<bool> failed_{false};
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::unique_ptr<MpiWire> wire_;
};

TEST_F(MpiWireTest, CarriesMessagesOfEverySizeAroundTheRing) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, MpiWire::kInlineBytes, MpiWire::kInlineBytes + 1,
                                 std::size_t{70000}, std::size_t{3'000'001}}) {
    const Bytes sent = pattern(size, rank());
    Bytes got(size);

    const auto receive = wire_->receive(previous(), 5, 77, got);
    const auto send = wire_->send(next(), 5, 77, sent);

    ASSERT_TRUE(send->wait(soon())) << size;
    ASSERT_TRUE(receive->wait(soon())) << size;
    EXPECT_EQ(got, pattern(size, previous())) << size;
  }
}

TEST_F(MpiWireTest, MessagesOfOneChannelKeepTheirOrderWhateverTheirSizes) {
  const std::vector<std::size_t> sizes = {10, 100000, 0, 20000, 3, 5000, 4096};
  std::vector<Bytes> sent, got;
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    sent.push_back(pattern(sizes[i], static_cast<int>(i)));
    got.emplace_back(sizes[i]);
  }

  for (std::size_t i = 0; i < sizes.size(); ++i) transfers.push_back(wire_->receive(previous(), 1, i, got[i]));
  for (std::size_t i = 0; i < sizes.size(); ++i) transfers.push_back(wire_->send(next(), 1, i, sent[i]));

  for (const auto& transfer : transfers) ASSERT_TRUE(transfer->wait(soon()));
  EXPECT_EQ(got, sent);
}

TEST_F(MpiWireTest, ChannelsMayOvertakeEachOther) {
  const Bytes first = pattern(50000, 1), second = pattern(60000, 2);
  Bytes got_first(50000), got_second(60000);
  const auto send_first = wire_->send(next(), 1, 0, first);
  const auto send_second = wire_->send(next(), 2, 0, second);

  const auto receive_second = wire_->receive(previous(), 2, 0, got_second);
  ASSERT_TRUE(receive_second->wait(soon()));
  const auto receive_first = wire_->receive(previous(), 1, 0, got_first);
  ASSERT_TRUE(receive_first->wait(soon()));

  ASSERT_TRUE(send_first->wait(soon()));
  ASSERT_TRUE(send_second->wait(soon()));
  EXPECT_EQ(got_first, first);
  EXPECT_EQ(got_second, second);
}

TEST_F(MpiWireTest, ThreadsOfOneProcessUseItAtOnce) {
  std::vector<std::jthread> threads;
  std::atomic<int> wrong{0};
  for (std::uint32_t channel = 0; channel < 4; ++channel) {
    threads.emplace_back([&, channel] {
      for (int round = 0; round < 20; ++round) {
        const Bytes sent = pattern(1000 * (channel + 1), round);
        Bytes got(sent.size());
        const auto receive = wire_->receive(previous(), channel, 1, got);
        const auto send = wire_->send(next(), channel, 1, sent);
        if (!send->wait(soon()) || !receive->wait(soon()) || got != sent) ++wrong;
      }
    });
  }
  threads.clear();

  EXPECT_EQ(wrong, 0);
}

// Sizes on both sides of what travels inline, in every combination that differs.
TEST_F(MpiWireTest, EndsThatDisagreeAreContractErrorsAndNoCrash) {
  struct Ends {
    std::size_t sent, expected;
    std::uint64_t sent_mark, expected_mark;
  };
  std::uint32_t channel = 10;
  for (const Ends& ends : {Ends{8, 9, 1, 1}, Ends{8, 8, 1, 2}, Ends{50000, 8, 1, 1}, Ends{8, 50000, 1, 1},
                           Ends{90000, 50000, 1, 1}, Ends{50000, 90000, 1, 1}, Ends{50000, 50000, 1, 2}}) {
    const Bytes sent = pattern(ends.sent, 1);
    Bytes got(ends.expected);
    const auto send = wire_->send(next(), ++channel, ends.sent_mark, sent);
    const auto receive = wire_->receive(previous(), channel, ends.expected_mark, got);

    EXPECT_THROW(static_cast<void>(receive->wait(soon())), ContractError) << ends.sent << " " << ends.expected;
    send->cancel();
  }
}

TEST_F(MpiWireTest, WaitEndsWithTheDeadlineAndWithTheWorld) {
  Bytes got(8);
  const auto receive = wire_->receive(previous(), 30, 1, got);

  EXPECT_FALSE(receive->test());
  EXPECT_FALSE(receive->wait(std::chrono::steady_clock::now() + 20ms));
  failed_ = true;
  EXPECT_FALSE(receive->wait(std::chrono::steady_clock::now() + 1h));
}

TEST_F(MpiWireTest, CancelledReceivesLeaveTheBytesAlone) {
  for (const std::size_t size : {std::size_t{100}, std::size_t{100000}}) {
    const Bytes sent = pattern(size, 3);
    Bytes got(size, std::byte{0xAB});
    const auto receive = wire_->receive(previous(), 31, 1, got);
    receive->cancel();
    MPI_Barrier(comm_);

    const auto send = wire_->send(next(), 31, 1, sent);
    Bytes taken(size);
    const auto second = wire_->receive(previous(), 31, 1, taken);
    ASSERT_TRUE(second->wait(soon()));
    ASSERT_TRUE(send->wait(soon()));

    EXPECT_EQ(got, Bytes(size, std::byte{0xAB}));
    EXPECT_EQ(taken, sent);
  }
}

TEST_F(MpiWireTest, MessagesBetweenWhichARankComputesProceedWhileNobodyWaits) {
  const Bytes sent = pattern(3000000, rank());
  Bytes got(sent.size());
  const auto receive = wire_->receive(previous(), 33, 1, got);
  const auto send = wire_->send(next(), 33, 1, sent);

  // Neither is asked: only a thread of the wire can bring the last byte.
  const std::byte last = pattern(sent.size(), previous()).back();
  const auto end = soon();
  while (std::atomic_ref(got.back()).load() != last && std::chrono::steady_clock::now() < end) std::this_thread::yield();

  EXPECT_EQ(std::atomic_ref(got.back()).load(), last);
  ASSERT_TRUE(send->wait(soon()));
  ASSERT_TRUE(receive->wait(soon()));
}

// To wake a thread takes many times as long as a small message.
TEST_F(MpiWireTest, MessagesOfCollectivesWakeNoThread) {
  const std::uint32_t of_collectives = 34, between = 35;
  const auto looks_of_exchanges = [&](std::uint32_t channel) {
    const std::int64_t before = wire_->looks_of_thread();
    for (int round = 0; round < 200; ++round) {
      const Bytes sent = pattern(64, round);
      Bytes got(sent.size());
      const auto receive = wire_->receive(previous(), channel, 1, got);
      const auto send = wire_->send(next(), channel, 1, sent);
      if (channel == between) std::this_thread::sleep_for(100us);
      EXPECT_TRUE(receive->wait(soon()) && send->wait(soon()));
      EXPECT_EQ(got, sent);
    }
    return wire_->looks_of_thread() - before;
  };

  EXPECT_GT(looks_of_exchanges(between), 0);
  MPI_Barrier(comm_);
  std::this_thread::sleep_for(5ms);  // the thread is through with the last of these
  EXPECT_EQ(looks_of_exchanges(of_collectives), 0);
}

TEST_F(MpiWireTest, ChannelsBeyondMpisTagsAreRefused) {
  EXPECT_THROW(static_cast<void>(wire_->send(rank(), 0xFFFFFFFFU, 1, {})), ContractError);
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const tandem::JobShape shape = tandem::MpiJob::get().shape();
  // One process speaks for all, unless another has something to say: failures of any end the job with a status.
  if (shape.rank != 0)
    delete testing::UnitTest::GetInstance()->listeners().Release(
        testing::UnitTest::GetInstance()->listeners().default_result_printer());
  const int status = RUN_ALL_TESTS();
  tandem::MpiJob::get().leave(status);
  return status;
}

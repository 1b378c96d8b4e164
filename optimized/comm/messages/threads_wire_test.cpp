// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/threads_wire.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <fstream>
#include <future>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<std::byte>;

Bytes bytes_of(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// A thread of this process, whose number appears in `thread`. Gives up after a while: what is tested holds awake, too.
void wait_until_asleep(const std::atomic<pid_t>& thread) {
  for (int look = 0; look < 100'000; ++look) {
    std::string number, name, state;
    if (thread != 0) std::ifstream("/proc/self/task/" + std::to_string(thread) + "/stat") >> number >> name >> state;
    if (state == "S") return;
    std::this_thread::yield();
  }
}

class ThreadsWire : public testing::Test {
 protected:
  std::shared_ptr<WorldState> world_ = std::make_shared<WorldState>(3, 1000ms, 1);
  std::vector<std::unique_ptr<Wire>> wires_ = make_threads_wires(world_, std::nullopt);

  [[nodiscard]] Wire& wire(int rank) { return *wires_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] static Clock::time_point soon() { return Clock::now() + 10ms; }
  [[nodiscard]] static Clock::time_point late() { return Clock::now() + 30s; }
};

TEST_F(ThreadsWire, KnowsItsRank) {
  EXPECT_EQ(wire(2).rank(), 2);
  EXPECT_EQ(wire(2).ranks(), 3);
}

TEST_F(ThreadsWire, TheNthSendMeetsTheNthReceiveOfItsPairAndChannel) {
  const Bytes first = bytes_of({1}), second = bytes_of({2}), other_channel = bytes_of({3}), other_pair = bytes_of({4});
  Bytes a(1), b(1), c(1), d(1);

  // Receives of different channels and pairs are posted the other way round.
  const auto at_pair = wire(1).receive(2, 0, 7, d);
  const auto at_channel = wire(1).receive(0, 5, 7, c);
  const auto at_first = wire(1).receive(0, 0, 7, a);
  const auto sent_first = wire(0).send(1, 0, 7, first);
  const auto sent_second = wire(0).send(1, 0, 7, second);
  const auto sent_channel = wire(0).send(1, 5, 7, other_channel);
  const auto sent_pair = wire(2).send(1, 0, 7, other_pair);
  const auto at_second = wire(1).receive(0, 0, 7, b);

  for (const auto* transfer :
       {&at_pair, &at_channel, &at_first, &at_second, &sent_first, &sent_second, &sent_channel, &sent_pair}) {
    EXPECT_TRUE((*transfer)->wait(late()));
    EXPECT_TRUE((*transfer)->test());
  }
  EXPECT_EQ(a, first);
  EXPECT_EQ(b, second);
  EXPECT_EQ(c, other_channel);
  EXPECT_EQ(d, other_pair);
}

TEST_F(ThreadsWire, AMessageWithoutItsOtherEndIsNotComplete) {
  Bytes target(4);
  const auto transfer = wire(0).receive(1, 0, 1, target);

  EXPECT_FALSE(transfer->test());
  EXPECT_FALSE(transfer->wait(soon()));
}

TEST_F(ThreadsWire, EndsThatDifferInMarkOrSizeAreRefusedOnBothSides) {
  Bytes source(4), target(4), small(3);
  for (const auto& [mark, bytes] : {std::pair<std::uint64_t, Bytes*>{2, &target}, {1, &small}}) {
    const Bytes before = *bytes;
    const auto sent = wire(0).send(1, 0, 1, source);
    const auto received = wire(1).receive(0, 0, mark, *bytes);
    EXPECT_THROW((void)sent->wait(late()), ContractError);
    EXPECT_THROW((void)received->test(), ContractError);
    EXPECT_EQ(*bytes, before);
  }
}

TEST_F(ThreadsWire, ACancelledMessageIsForgottenAndItsBufferLeftAlone) {
  const Bytes source = bytes_of({9});
  Bytes target(1);
  {
    Bytes gone(1);
    const auto cancelled = wire(1).receive(0, 0, 1, gone);
    cancelled->cancel();
  }
  const auto sent = wire(0).send(1, 0, 1, source);
  EXPECT_FALSE(sent->test());

  const auto received = wire(1).receive(0, 0, 1, target);
  EXPECT_TRUE(received->wait(late()));
  EXPECT_TRUE(sent->wait(late()));
  EXPECT_EQ(target, source);
}

TEST_F(ThreadsWire, AFailureOfTheWorldEndsWaiting) {
  Bytes target(1);
  const auto transfer = wire(0).receive(1, 0, 1, target);
  auto waiting = std::async(std::launch::async, [&] { return transfer->wait(Clock::now() + 300s); });

  world_->fail({Failure::Kind::peer, 1, "over"});

  ASSERT_EQ(waiting.wait_for(60s), std::future_status::ready);
  EXPECT_FALSE(waiting.get());
}

// A receiver that has posted may compute for long before it looks again: the sender's buffer is free all the same.
TEST_F(ThreadsWire, ASenderAsleepIsWokenByThePostingOfTheReceiveAlone) {
  const Bytes source = bytes_of({1, 2, 3});
  for (int round = 0; round < 20; ++round) {
    std::atomic<pid_t> sender = 0;
    const auto sent = wire(0).send(1, 0, 1, source);
    auto waiting = std::async(std::launch::async, [&] {
      sender = ::gettid();
      return sent->wait(Clock::now() + 300s);
    });
    wait_until_asleep(sender);
    Bytes target(3);
    const auto received = wire(1).receive(0, 0, 1, target);
    const bool is_woken = waiting.wait_for(10s) == std::future_status::ready;
    if (!is_woken) world_->fail({Failure::Kind::peer, 1, "over"});
    ASSERT_TRUE(is_woken);
    EXPECT_TRUE(waiting.get());
    EXPECT_EQ(target, source);
  }
}

TEST(ShapedWire, DeliversAfterItsTimeAndNotBefore) {
  const auto world = std::make_shared<WorldState>(2, 60000ms, 1);
  LinkProfile link;
  link.between_nodes = {.latency_seconds = 30e-3, .bytes_per_second = 1e9};
  const auto wires = make_threads_wires(world, link);
  const Bytes source = bytes_of({1, 2, 3});
  Bytes target(3);

  const Clock::time_point begin = Clock::now();
  const auto sent = wires[0]->send(1, 1, 4, source);
  const auto received = wires[1]->receive(0, 1, 4, target);
  ASSERT_TRUE(sent->wait(begin + 60s)) << "the bytes are out long before they arrive";
  ASSERT_TRUE(received->wait(begin + 60s));

  EXPECT_GE(Clock::now() - begin, 30ms);
  EXPECT_EQ(target, source);
}

TEST(ShapedWire, AFailureEndsTheWaitForAMessageThatIsUnderWay) {
  const auto world = std::make_shared<WorldState>(2, 60000ms, 1);
  LinkProfile link;
  link.between_nodes = {.latency_seconds = 3600, .bytes_per_second = 1e9};
  const auto wires = make_threads_wires(world, link);
  Bytes source(3), target(3);
  const auto sent = wires[0]->send(1, 0, 4, source);
  const auto received = wires[1]->receive(0, 0, 4, target);
  auto waiting = std::async(std::launch::async, [&] { return received->wait(Clock::now() + 300s); });

  world->fail({Failure::Kind::peer, 1, "over"});

  ASSERT_EQ(waiting.wait_for(60s), std::future_status::ready);
  EXPECT_FALSE(waiting.get());
}

}  // namespace
}  // namespace tandem

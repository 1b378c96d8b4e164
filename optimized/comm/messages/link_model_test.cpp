// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/link_model.h"

#include <vector>

#include <gtest/gtest.h>

namespace tandem {
namespace {

constexpr std::int64_t kMicrosecond = 1000;

// 1 byte/ns and 100 us in the node, a tenth of the rate and 1 ms between nodes of two ranks.
LinkProfile profile() {
  LinkProfile profile;
  profile.ranks_per_node = 2;
  profile.in_node = {.latency_seconds = 100e-6, .bytes_per_second = 1e9};
  profile.between_nodes = {.latency_seconds = 1e-3, .bytes_per_second = 1e8};
  return profile;
}

std::int64_t delivery(LinkModel& model, int from, int to, std::int64_t bytes, std::int64_t posted_ns) {
  return model.arrive(from, to, bytes, model.depart(from, to, bytes, posted_ns));
}

TEST(LinkModel, AMessageTakesLatencyAndBytesOverRate) {
  LinkModel model(profile(), 4);

  EXPECT_EQ(delivery(model, 0, 1, 5000, 7), 7 + 100 * kMicrosecond + 5000);
  EXPECT_EQ(delivery(model, 1, 2, 5000, 7), 7 + 1000 * kMicrosecond + 50000);
  EXPECT_EQ(delivery(model, 3, 3, 5000, 7), 7) << "to itself";
}

TEST(LinkModel, TheSendersPortIsTakenAsLongAsTheBytesLeave) {
  LinkModel model(profile(), 4);

  const auto first = model.depart(0, 1, 3000, 0);
  const auto second = model.depart(0, 1, 1000, 100);
  const auto elsewhere = model.depart(0, 2, 1000, 100);  // through the other port
  const auto later = model.depart(0, 1, 1000, 50000);

  EXPECT_EQ(first.left_ns, 3000);
  EXPECT_EQ(second.start_ns, 3000);
  EXPECT_EQ(second.left_ns, 4000);
  EXPECT_EQ(elsewhere.start_ns, 100);
  EXPECT_EQ(later.start_ns, 50000);
}

TEST(LinkModel, TheReceiversPortTakesOneMessageAfterTheOther) {
  LinkProfile one_node = profile();
  one_node.ranks_per_node = 4;
  LinkModel model(one_node, 4);

  EXPECT_EQ(delivery(model, 1, 0, 2000, 0), 100 * kMicrosecond + 2000);
  EXPECT_EQ(delivery(model, 2, 0, 2000, 0), 100 * kMicrosecond + 4000);
  EXPECT_EQ(delivery(model, 3, 0, 2000, 0), 100 * kMicrosecond + 6000);
  EXPECT_EQ(delivery(model, 0, 3, 2000, 0), 100 * kMicrosecond + 2000) << "ports are full duplex";
}

TEST(LinkModel, ARingTakesTwiceRanksLessOneSteps) {
  const int ranks = 4;
  const std::int64_t part_bytes = 1000;
  LinkProfile flat = profile();
  flat.ranks_per_node = 1;
  LinkModel model(flat, ranks);
  std::vector<std::int64_t> now(ranks, 0);

  for (int step = 0; step < 2 * (ranks - 1); ++step) {
    std::vector<std::int64_t> next(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      const auto from = static_cast<std::size_t>(rank);
      const auto to = static_cast<std::size_t>((rank + 1) % ranks);
      next[to] = delivery(model, rank, static_cast<int>(to), part_bytes, now[from]);
    }
    now = next;
  }

  EXPECT_EQ(now, std::vector<std::int64_t>(ranks, 2 * (ranks - 1) * (1000 * kMicrosecond + part_bytes * 10)));
}

TEST(LinkModel, DilationStretchesLatencyAndBytes) {
  LinkProfile slow = profile();
  slow.dilation = 20;
  LinkModel model(slow, 4);

  EXPECT_EQ(delivery(model, 0, 1, 5000, 0), 20 * (100 * kMicrosecond + 5000));
}

TEST(LinkModel, JitterOnlyStretchesTheLatencyAndComesFromTheSeed) {
  LinkProfile shaky = profile();
  shaky.in_node.jitter = 0.5;
  const auto latencies = [&](std::uint64_t seed) {
    shaky.jitter_seed = seed;
    LinkModel model(shaky, 4);
    std::vector<std::int64_t> all;
    for (int i = 0; i < 20; ++i) {
      const std::int64_t posted_ns = i * 1'000'000;
      all.push_back(delivery(model, 0, 1, 5000, posted_ns) - posted_ns);
    }
    return all;
  };

  const std::vector<std::int64_t> some = latencies(1);
  for (const std::int64_t latency : some) {
    EXPECT_GE(latency, 100 * kMicrosecond + 5000);
    EXPECT_LE(latency, 150 * kMicrosecond + 5000);
  }
  EXPECT_NE(some.front(), some.back());
  EXPECT_EQ(some, latencies(1));
  EXPECT_NE(some, latencies(2));
}

TEST(LinkModel, NoRateIsNoLimit) {
  LinkProfile quick = profile();
  quick.in_node.bytes_per_second = 0;
  LinkModel model(quick, 4);

  EXPECT_EQ(delivery(model, 0, 1, 1'000'000'000, 0), 100 * kMicrosecond);
}

TEST(ModelClock, PostsOfACollectiveHappenWhenTheLastMessageArrivedThoughItsThreadWokeUpLate) {
  ModelClock clock(true);

  clock.begin(1000);
  EXPECT_EQ(clock.post_ns(1500), 1000);
  clock.waited(50'000, 2000, 130'000);
  EXPECT_EQ(clock.post_ns(135'000), 50'000);
  clock.waited(20'000, 136'000, 137'000);  // had arrived long before
  EXPECT_EQ(clock.post_ns(138'000), 50'000);
}

TEST(ModelClock, ACollectiveBeginsWhenItWasIssuedOrTheOneBeforeItEnded) {
  ModelClock clock(true);
  clock.begin(0);
  clock.waited(50'000, 0, 90'000);

  clock.begin(30'000);  // issued while the other was under way
  EXPECT_EQ(clock.post_ns(95'000), 50'000);
  clock.begin(70'000);
  EXPECT_EQ(clock.post_ns(95'000), 70'000);
}

TEST(ModelClock, WhatTakesLongerThanAWakingCounts) {
  ModelClock clock(true);
  clock.begin(0);

  EXPECT_EQ(clock.post_ns(10'000'000), 10'000'000 - ModelClock::kLongestLateness_ns);
}

TEST(ModelClock, TimeBetweenMessagesIsComputingAndCounts) {
  ModelClock clock(false);

  EXPECT_EQ(clock.post_ns(5000), 5000);
  clock.waited(50'000, 6000, 130'000);  // woken up 80 us late
  EXPECT_EQ(clock.post_ns(1'130'000), 1'050'000);
  clock.waited(60'000, 1'130'000, 1'130'000);  // had arrived while the rank computed
  EXPECT_EQ(clock.post_ns(1'230'000), 1'150'000);
}

}  // namespace
}  // namespace tandem

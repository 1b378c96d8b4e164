// SPDX-License-Identifier: Apache-2.0
// Looks at tensors, replicas, links and times.
#include <cmath>
#include <limits>
#include <span>

#include <gtest/gtest.h>

#include "optimized/anomaly/activation_ranges.h"
#include "optimized/anomaly/link_probe.h"
#include "optimized/anomaly/performance.h"
#include "optimized/anomaly/replica_hash.h"
#include "optimized/anomaly/state_ranges.h"
#include "optimized/comm/world.h"

namespace tandem {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

PitfallSet with(Pitfall pitfall) { return PitfallSet(std::span(&pitfall, 1)); }

AnomalyFinding of(AnomalyMonitor monitor) {
  AnomalyFinding finding;
  finding.monitor = monitor;
  return finding;
}

template <class T>
TensorLook look_at_values(std::vector<T> values) {
  return look_at(view_of(values, {std::ssize(values)}));
}

TEST(StateRanges, FindsTheLargestMagnitudeAndWhatIsNotFinite) {
  std::vector<float> many(100000, 0.5F);
  many[70001] = -3.25F;
  EXPECT_EQ(look_at_values(many).largest, 3.25);
  EXPECT_TRUE(look_at_values(many).finite);
  EXPECT_EQ(look_at_values(std::vector<double>{-1e200, 4.0}).largest, 1e200);
  many[99999] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(look_at_values(many).finite);
  EXPECT_FALSE(look_at_values(std::vector<double>{1.0, -kInfinity}).finite);
  std::vector<std::uint16_t> bits = {0x3c00, 0xc100, 0x0001};
  EXPECT_EQ(range_of(TensorView(bits.data(), DType::f16, {3})).largest, 2.5);
  EXPECT_EQ(range_of(TensorView(bits.data() + 2, DType::f16, {1})).largest, std::ldexp(1.0, -24));
  EXPECT_EQ(range_of(TensorView(bits.data(), DType::bf16, {2})).largest, 8);
}

TEST(StateRanges, HashesEveryBit) {
  std::vector<float> values(50000, 1.0F);
  const std::uint64_t before = look_at_values(values).hash;
  for (const std::size_t at : {std::size_t{0}, std::size_t{8191}, std::size_t{8192}, values.size() - 1}) {
    std::vector<float> other = values;
    other[at] = std::nextafter(1.0F, 2.0F);
    EXPECT_NE(look_at_values(other).hash, before) << at;
  }
}

TEST(WeightRanges, KnowsHowFarTrainingMovesAWeight) {
  WeightRanges ranges;
  EXPECT_FALSE(ranges.see("a", 0.0)) << "nothing to compare with";
  ranges.end_look();
  for (int i = 0; i < 16; ++i) ranges.count_update(0.1, 1.0);

  EXPECT_FALSE(ranges.see("a", 16 * 0.1 * 3.2)) << "AdamW can do that";
  ranges.end_look();
  const auto excess = ranges.see("a", 1e6);
  ASSERT_TRUE(excess);
  EXPECT_EQ(excess->tensor, "a");
  EXPECT_LT(excess->limit, 100);
}

TEST(WeightRanges, KnowNothingOfTheCourseThatWasLeft) {
  WeightRanges ranges;
  EXPECT_FALSE(ranges.see("w", 0.1));
  ranges.clear();

  EXPECT_FALSE(ranges.see("w", 1000)) << "the first look after going back";
  EXPECT_TRUE(ranges.see("w", 1e6));
}

TEST(ActivationRanges, NamesTheLowestLayer) {
  ActivationRanges ranges;
  for (int sample = 0; sample < 3; ++sample) {
    ranges.begin_step();
    for (int layer = 0; layer < 3; ++layer) ranges.see(layer, {.largest = 2.0 + layer});
    EXPECT_FALSE(ranges.lowest_excess());
    ranges.accept();
  }
  ranges.begin_step();
  ranges.see(2, {.finite = false, .largest = kInfinity});
  ranges.see(1, {.largest = 49});
  ranges.see(0, {.largest = 31});

  ASSERT_TRUE(ranges.lowest_excess());
  EXPECT_EQ(ranges.lowest_excess()->layer, 1);
  EXPECT_EQ(ranges.lowest_excess()->limit, 48);
}

TEST(GroupHash, NamesTheOddOneOfThreeAndBothOfTwo) {
  const std::vector<std::vector<GroupHash>> hashes = {{{7, 1}}, {{7, 1}, {9, 5}}, {{7, 2}, {9, 6}}, {{7, 1}}};

  const std::vector<CopyDivergence> found = compare_replicas(hashes, 0);

  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].odd, std::vector<int>{2});
  EXPECT_TRUE(found[0].is_named());
  EXPECT_EQ(found[1].odd, (std::vector<int>{1, 2}));
  EXPECT_FALSE(found[1].is_named());
  EXPECT_EQ(name_ranks(found[1].ranks), "rank 1 or 2");
  EXPECT_TRUE(compare_replicas(hashes, 3, with(Pitfall::replica_compared_with_itself)).empty()) << "the fault is not there";
  EXPECT_EQ(first_difference(found[1], {{}, {{"a", 1}, {"b", 2}}, {{"a", 1}, {"b", 3}}, {}}), "b");
}

TEST(LinkProbe, NamesTheSlowLinkOrTheRankBetweenTwo) {
  const std::vector<double> usual(4, 1e-4);
  const auto where = [&](const std::vector<double>& now, const std::vector<double>& before) {
    const auto slow = find_slow_link(now, before);
    return slow ? slow->where : std::string("none");
  };

  EXPECT_EQ(where({1e-4, 5e-3, 1e-4, 1e-4}, usual), "link 1-2");
  EXPECT_EQ(where({1e-4, 1e-4, 1e-4, 5e-3}, usual), "link 3-0");
  EXPECT_EQ(where({1e-4, 5e-3, 7e-3, 1e-4}, usual), "links of rank 2");
  EXPECT_EQ(find_slow_link({5e-3, 1e-4, 7e-3}, {1e-4, 1e-4, 1e-4})->rank, 0);
  EXPECT_EQ(where({5e-3, 6e-3, 7e-3, 5e-3}, usual), "none") << "then it is the machine";
  EXPECT_EQ(where({9e-4, 1e-4, 1e-4, 1e-4}, usual), "none") << "less than a millisecond";
  EXPECT_EQ(where({5e-3, 1e-4, 1e-4, 1e-4}, {4e-3, 1e-4, 1e-4, 1e-4}), "none") << "it always was";
  EXPECT_EQ(where({5e-3}, {1e-4}), "link 0-1");
  EXPECT_EQ(where({}, {}), "none");
}

TEST(LinkProbe, IsTheSameOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    std::vector<std::vector<double>> seen(static_cast<std::size_t>(ranks));
    run_world({.ranks = ranks},
              [&](Communicator& comm) { seen[static_cast<std::size_t>(comm.rank())] = probe_links(comm, 3, 1024); });

    EXPECT_EQ(seen.front().size(), static_cast<std::size_t>(ranks == 3 ? 3 : ranks - 1));
    for (const std::vector<double>& one : seen) EXPECT_EQ(one, seen.front());
    for (const double seconds : seen.front()) EXPECT_GT(seconds, 0);
  }
}

Span span(const std::string& name, Activity activity, double seconds) {
  Span one;
  one.name = name;
  one.activity = activity;
  one.end_ns = static_cast<std::int64_t>(seconds * 1e9);
  return one;
}

TEST(PerformanceMonitor, SeesACollectiveThatHasBecomeSlow) {
  PerformanceMonitor monitor;
  RankTimes last;
  for (int sample = 0; sample < 30; ++sample) {
    const double seconds = sample < 20 ? 1e-3 : 2e-2;
    last = monitor.see_spans({span("forward", Activity::compute, 0.5), span("sum 'a'", Activity::wait, seconds / 2),
                              span("sum 'a'", Activity::transfer, seconds / 2), span("sum 'b'", Activity::transfer, 1e-3)});
    EXPECT_EQ(last.compute_seconds, 0.5);
    EXPECT_EQ(last.slow_collective, sample == 24 ? "sum 'a'" : "") << sample;
  }
}

TEST(PerformanceMonitor, NamesTheRankThatComputesSlowly) {
  run_world({.ranks = 1}, [](Communicator& comm) {
    PerformanceMonitor monitor;
    std::vector<AnomalyFinding> found;
    for (int sample = 0; sample < 30; ++sample) {
      const double machine = sample % 2 == 0 ? 1 : 3;  // all of them are slower now and then
      std::vector<RankTimes> times(3);
      for (std::size_t rank = 0; rank < 3; ++rank) times[rank].compute_seconds = machine * (rank == 2 ? 0.3 : 0.1);
      if (sample >= 20) times[1].compute_seconds *= 4;
      for (const AnomalyFinding& finding : monitor.compare(sample, times, comm)) found.push_back(finding);
    }
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].monitor, AnomalyMonitor::slow_rank);
    EXPECT_EQ(found[0].rank, 1);
    EXPECT_EQ(found[0].step, 24);
  });
}

TEST(AnomalyFinding, IsOneLineThatNamesRankAndPlace) {
  AnomalyFinding finding = of(AnomalyMonitor::gradient_not_finite);
  finding.rank = 1;
  finding.where = "loss";
  EXPECT_EQ(finding.describe(), "rank 1: loss or gradient is not finite (loss)");
  finding = of(AnomalyMonitor::loss_spike);
  finding.value = 15.5;
  finding.limit = 12;
  EXPECT_EQ(finding.describe(), "the loss spikes: z 15.5, limit 12");
  finding = of(AnomalyMonitor::activation_range);
  finding.value = std::numeric_limits<double>::infinity();
  EXPECT_EQ(finding.describe(), "an activation is not finite") << "no limit is known so early";
}

}  // namespace
}  // namespace tandem

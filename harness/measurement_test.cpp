// SPDX-License-Identifier: Apache-2.0
#include "harness/measurement.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "harness/interval_set.h"
#include "harness/self_checks.h"

namespace tandem {
namespace {

PitfallSet only(Pitfall pitfall) { return PitfallSet(std::array{pitfall}); }

bool all_hold(const std::vector<Property>& properties) {
  for (const Property& property : properties) {
    if (!property.holds()) return false;
  }
  return true;
}

TEST(IntervalSet, UnitesSubtractsAndIntersects) {
  const IntervalSet set({{5, 9}, {0, 3}, {2, 4}, {7, 7}, {8, 12}, {4, 4}});
  EXPECT_EQ(set.intervals(), (std::vector<Interval>{{0, 4}, {5, 12}}));
  EXPECT_EQ(set.length(), 11);
  const IntervalSet other({{1, 2}, {3, 6}, {11, 20}});
  EXPECT_EQ(set.intersected(other).intervals(), (std::vector<Interval>{{1, 2}, {3, 4}, {5, 6}, {11, 12}}));
  EXPECT_EQ(set.without(other).intervals(), (std::vector<Interval>{{0, 1}, {2, 3}, {6, 11}}));
  EXPECT_EQ(set.united(other).intervals(), (std::vector<Interval>{{0, 20}}));
  EXPECT_TRUE(set.contains(0) && set.contains(11));
  EXPECT_FALSE(set.contains(4) || set.contains(12) || set.contains(-1));
}

// Every nanosecond is painted with what happened in it.
TimeSplit painted(const std::vector<Span>& spans, int first_step, std::int64_t length) {
  TimeSplit split;
  for (std::int64_t now = 0; now < length; ++now) {
    std::array<bool, 7> on{};
    for (const Span& span : spans) {
      if (span.activity == Activity::step && span.step < first_step) continue;
      if (span.begin_ns <= now && now < span.end_ns) on[static_cast<std::size_t>(span.activity)] = true;
    }
    const auto is = [&](Activity activity) { return on[static_cast<std::size_t>(activity)]; };
    if (!is(Activity::step)) continue;
    const bool compute = is(Activity::compute) || is(Activity::optimizer);
    const bool communication = is(Activity::transfer) || is(Activity::wait);
    ++split.wall_ns;
    split.communication_busy_ns += communication ? 1 : 0;
    if (compute) {
      ++split.compute_ns;
    } else if (communication) {
      ++split.communication_exposed_ns;
    } else if (is(Activity::data)) {
      ++split.data_ns;
    } else if (is(Activity::checkpoint)) {
      ++split.checkpoint_ns;
    } else {
      ++split.idle_ns;
    }
  }
  return split;
}

std::vector<Span> random_trace(std::uint64_t seed, std::int64_t length) {
  CounterRng rng(seed, "traces");
  std::vector<Span> spans;
  std::int64_t begin = 0;
  for (int step = 0; begin < length; ++step) {
    const auto end = std::min<std::int64_t>(length, begin + static_cast<std::int64_t>(rng.next_below(60)));
    Span span;
    span.activity = Activity::step;
    span.step = step;
    span.begin_ns = begin;
    span.end_ns = end;
    spans.push_back(span);
    begin = end + static_cast<std::int64_t>(rng.next_below(10));
  }
  for (int i = 0; i < 30; ++i) {
    Span span;
    span.activity = static_cast<Activity>(rng.next_below(6));
    span.begin_ns = static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(length)));
    span.end_ns = span.begin_ns + static_cast<std::int64_t>(rng.next_below(25));
    spans.push_back(span);
  }
  return spans;
}

TEST(TimeSplit, EqualsPaintingEveryNanosecondAndAddsUpExactly) {
  constexpr std::int64_t kLength = 300;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const std::vector<Span> spans = random_trace(seed, kLength);
    const TimeSplit split = split_time(spans, 1, {});
    const TimeSplit expected = painted(spans, 1, kLength);
    EXPECT_EQ(split.wall_ns, expected.wall_ns);
    EXPECT_EQ(split.compute_ns, expected.compute_ns);
    EXPECT_EQ(split.communication_busy_ns, expected.communication_busy_ns);
    EXPECT_EQ(split.communication_exposed_ns, expected.communication_exposed_ns);
    EXPECT_EQ(split.data_ns, expected.data_ns);
    EXPECT_EQ(split.checkpoint_ns, expected.checkpoint_ns);
    EXPECT_EQ(split.idle_ns, expected.idle_ns);
    EXPECT_EQ(split.compute_ns + split.communication_exposed_ns + split.data_ns + split.checkpoint_ns + split.idle_ns,
              split.wall_ns);
  }
}

TEST(TimeSplit, OfNoStepsIsZero) {
  const TimeSplit split = split_time({}, 0, {});
  EXPECT_EQ(split.wall_ns, 0);
  EXPECT_EQ(split.idle_ns, 0);
}

TEST(ModelFlops, EqualHandComputedValues) {
  GptConfig model;
  model.vocabulary = 10;
  model.layers = 2;
  model.hidden = 4;
  model.heads = 2;
  // Forward, 3 tokens: 3 [2 (96 + 32 + 256) + 80] + 2 * 16 * 6 = 2544 + 192.
  EXPECT_EQ(model_flops_per_row(model, 3, {}), 3 * (2544 + 192));
  model.mlp_hidden = 6;
  EXPECT_EQ(model_flops_per_row(model, 3, {}), 3 * (3 * (2 * (96 + 32 + 96) + 80) + 192));
}

TEST(ModelFlops, OfGpt2AreNearSixTimesItsMatrixParametersPerToken) {
  GptConfig model{.vocabulary = 50257, .sequence = 1024, .layers = 12, .hidden = 768, .heads = 12};
  const double matrices = 12.0 * 12 * 768 * 768 + 50257.0 * 768;
  EXPECT_NEAR(model_flops_per_row(model, 1, {}) / (6 * matrices), 1, 1e-3);
  const double attention = 3 * 12 * 4.0 * 768 * 1024 * 1025 / 2;
  EXPECT_DOUBLE_EQ(model_flops_per_row(model, 1024, {}), 1024 * 6 * matrices + attention);
}

TEST(ModelFlops, EqualMultiplyAddsCountedInLoops) {
  for (const std::int64_t mlp : {0, 24}) {
    for (const std::int64_t tokens : {1, 2, 7, 16}) {
      const GptConfig model{.vocabulary = 37, .sequence = 16, .layers = 3, .hidden = 12, .heads = 3, .mlp_hidden = mlp};
      EXPECT_EQ(model_flops_per_row(model, tokens, {}),
                3.0 * 2.0 * static_cast<double>(count_forward_multiply_adds(model, tokens)));
    }
  }
}

TEST(Utilization, DividesByThePeakOfAllDevices) {
  EXPECT_DOUBLE_EQ(utilization(600, 2, 100, 4, {}), 0.75);
  EXPECT_DOUBLE_EQ(utilization(104, 1, 100, 1, {}), 1.04);
  EXPECT_THROW((void)utilization(106, 1, 100, 1, {}), ContractError);
  EXPECT_THROW((void)utilization(std::nan(""), 1, 100, 1, {}), ContractError);
}

TEST(SelfChecks, AllHoldOnAHealthyHarness) {
  const GptConfig model;
  const std::int64_t counted = 3 * count_forward_multiply_adds(model, 11);
  EXPECT_TRUE(all_hold(flops_properties(counted, model, 11, {})));
  EXPECT_TRUE(all_hold(utilization_properties({})));
  EXPECT_TRUE(all_hold(time_split_properties({})));
  EXPECT_TRUE(all_hold(timer_properties(PitfallSet())));
  EXPECT_GE(time_split_properties({}).size(), 50U);
}

TEST(SelfChecks, EachCatchesItsPitfall) {
  const GptConfig model;
  const std::int64_t counted = 3 * count_forward_multiply_adds(model, 11);
  EXPECT_FALSE(all_hold(flops_properties(counted, model, 11, only(Pitfall::full_attention_flops))));
  EXPECT_FALSE(all_hold(utilization_properties(only(Pitfall::peak_of_one_device))));
  EXPECT_FALSE(all_hold(time_split_properties(only(Pitfall::spans_summed_not_united))));
  EXPECT_FALSE(all_hold(time_split_properties(only(Pitfall::waits_counted_as_compute))));
  EXPECT_FALSE(all_hold(timer_properties(only(Pitfall::timer_stopped_before_completion))));
  EXPECT_FALSE(all_hold(timer_properties(only(Pitfall::warm_up_included))));
}

Span transfer(std::int64_t bytes, Purpose purpose, int step) {
  Span span;
  span.activity = Activity::transfer;
  span.purpose = purpose;
  span.bytes = bytes;
  span.step = step;
  span.begin_ns = 1000 * step + 600;
  span.end_ns = 1000 * step + 900;
  return span;
}

Measured two_ranks() {
  Measured measured;
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<Span>& spans = measured.spans_by_rank.emplace_back();
    for (int step = 0; step < 3; ++step) {
      Span compute;
      compute.step = step;
      compute.begin_ns = 1000 * step;
      compute.end_ns = 1000 * step + 600 + 100 * rank;
      spans.push_back(compute);
      spans.push_back(transfer(step == 0 ? 1'000'000 : 40, Purpose::gradient, step));
      Span untagged = transfer(2, Purpose::other, step);
      untagged.step = -1;
      spans.push_back(untagged);
      Span whole;
      whole.activity = Activity::step;
      whole.step = step;
      whole.begin_ns = 1000 * step;
      whole.end_ns = 1000 * step + 1000;
      spans.push_back(whole);
    }
  }
  measured.step_seconds = {1e-6, 1e-6};
  measured.wall_seconds = 2e-6;
  measured.tokens_per_step = 8;
  measured.model_flops_per_step = 50;
  measured.peak_flops_per_second = 1e8;
  return measured;
}

TEST(Derive, GivesRatesBytesAndSharesOfMeasuredStepsOnly) {
  const Measurements result = derive(two_ranks(), {});

  EXPECT_DOUBLE_EQ(result.step_seconds.median, 1e-6);
  EXPECT_DOUBLE_EQ(result.tokens_per_second, 8e6);
  EXPECT_EQ(result.bytes_on_wire, 84) << "2 ranks x (40 + 2); the warm-up step does not count";
  EXPECT_EQ(result.bytes_by_purpose, (std::vector<std::int64_t>{80, 0, 0, 4}));
  EXPECT_DOUBLE_EQ(result.compute_share, 0.65);
  EXPECT_DOUBLE_EQ(result.busy_share, 0.3);
  EXPECT_DOUBLE_EQ(result.exposed_share, 0.25);
  EXPECT_DOUBLE_EQ(result.idle_share, 0.1);
  EXPECT_DOUBLE_EQ(result.compute_share + result.exposed_share + result.data_share + result.checkpoint_share + result.idle_share,
                   1);
  EXPECT_EQ(result.bottleneck, "compute");
  EXPECT_DOUBLE_EQ(result.model_flops_utilization, 0.5);
  EXPECT_DOUBLE_EQ(result.steps_over_wall, 1);
}

TEST(Derive, KnowsNoSharesWithoutSpans) {
  Measured measured = two_ranks();
  measured.spans_by_rank.clear();
  const Measurements result = derive(measured, {});
  EXPECT_TRUE(std::isnan(result.compute_share) && std::isnan(result.exposed_share));
  EXPECT_EQ(result.bottleneck, "");
  EXPECT_EQ(result.bytes_on_wire, 0);
}

TEST(Derive, RefusesMoreThanTheMachineCanDo) {
  Measured measured = two_ranks();
  measured.peak_flops_per_second = 1e7;
  EXPECT_THROW((void)derive(measured, {}), ContractError);
}

TEST(BusBandwidth, IsWhatTheLinkCarries) {
  // 4 ranks, 8 GB: 12 GB pass each link in an all-reduce, 6 in a half of one.
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::all_reduce, 8e9, 2, 4, {}), 6e9);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::all_gather, 8e9, 2, 4, {}), 3e9);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::all_to_all, 8e9, 2, 4, {}), 3e9);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::broadcast, 8e9, 2, 4, {}), 4e9);
  EXPECT_DOUBLE_EQ(bus_bandwidth(Collective::all_gather, 8e9, 2, 4, only(Pitfall::all_reduce_factor_for_every_collective)), 6e9);
}

}  // namespace
}  // namespace tandem

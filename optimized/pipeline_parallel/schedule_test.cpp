// SPDX-License-Identifier: Apache-2.0
#include "optimized/pipeline_parallel/schedule.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/pipeline_parallel/schedule_replay_test_support.h"

namespace tandem {
namespace {

using Orders = std::vector<std::vector<PipelineSlot>>;

PipelineConfig config_of(const std::string& schedule, int chunks = 1) { return {schedule, chunks, ""}; }

Orders orders_of(const PipelineConfig& config, int ranks, int micro_batches) {
  Orders orders;
  for (int rank = 0; rank < ranks; ++rank) orders.push_back(pipeline_order(config, ranks, rank, micro_batches));
  return orders;
}

ScheduleFacts facts_of(const PipelineConfig& config, int ranks, int micro_batches, SlotCosts costs = {}) {
  return replay_schedule(config, orders_of(config, ranks, micro_batches), costs);
}

int worst(const std::vector<int>& peaks) { return *std::max_element(peaks.begin(), peaks.end()); }

bool splits(const std::string& schedule) { return schedule.starts_with("zb"); }

std::vector<PipelineConfig> all_configs() {
  return {config_of("gpipe"),          config_of("1f1b"),  config_of("interleaved", 2), config_of("interleaved", 3),
          config_of("interleaved", 4), config_of("zb-h1"), config_of("zb-v", 2)};
}

// Ranks 1 to 16 with few, equal, and more micro-batches than ranks.
template <class Check>
void for_each_size(const PipelineConfig& config, const Check& check) {
  for (int ranks = 1; ranks <= 16; ++ranks) {
    const std::set<int> counts = config.schedule == "interleaved"
                                     ? std::set<int>{ranks, 2 * ranks, 5 * ranks}
                                     : std::set<int>{1, 2, 3, ranks, ranks + 1, 2 * ranks, 3 * ranks + 1};
    for (const int micro_batches : counts) {
      SCOPED_TRACE(config.schedule + " v=" + std::to_string(config.chunks) + " p=" + std::to_string(ranks) +
                   " m=" + std::to_string(micro_batches));
      check(ranks, micro_batches);
    }
  }
}

class EverySchedule : public testing::TestWithParam<PipelineConfig> {};

TEST_P(EverySchedule, RunsEachSlotOnceAndInOrderOfMicroBatches) {
  const PipelineConfig config = GetParam();
  for_each_size(config, [&](int ranks, int micro_batches) {
    for (const auto& order : orders_of(config, ranks, micro_batches)) {
      std::map<std::pair<SlotKind, int>, int> next;  // (kind, chunk) -> micro-batch
      for (const PipelineSlot& slot : order) ASSERT_EQ((next[{slot.kind, slot.chunk}]++), slot.micro_batch);
      const int kinds = splits(config.schedule) ? 3 : 2;
      ASSERT_EQ(static_cast<int>(next.size()), kinds * config.chunks);
      for (const auto& [key, count] : next) {
        ASSERT_EQ(count, micro_batches);
        ASSERT_EQ(key.first == SlotKind::backward, key.first != SlotKind::forward && !splits(config.schedule));
      }
    }
  });
}

// The replay refuses what waits for ever and what comes before its own input.
TEST_P(EverySchedule, EndsAndLosesNoWork) {
  const PipelineConfig config = GetParam();
  for_each_size(config, [&](int ranks, int micro_batches) {
    const ScheduleFacts facts = facts_of(config, ranks, micro_batches, {1.5, 2, 0.5});
    const double work = 4.0 * config.chunks * micro_batches;
    ASSERT_GE(facts.makespan, work);
    ASSERT_NEAR(1 - facts.bubble_share, work / facts.makespan, 1e-12);
  });
}

INSTANTIATE_TEST_SUITE_P(Pipeline, EverySchedule, testing::ValuesIn(all_configs()), [](const auto& test) {
  std::string text = test.param.schedule + std::to_string(test.param.chunks);
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
});

TEST(PipelineOrder, IsThatOfTheirPictures) {
  const auto text = [](const PipelineConfig& config, int ranks, int rank, int micro_batches) {
    std::string letters;
    for (const PipelineSlot& slot : pipeline_order(config, ranks, rank, micro_batches)) {
      const auto letter = [&](char first) { letters += static_cast<char>(first + slot.micro_batch); };
      if (slot.kind == SlotKind::forward) letter('0');
      if (slot.kind == SlotKind::backward || slot.kind == SlotKind::backward_input) letter('a');
      if (slot.kind == SlotKind::backward || slot.kind == SlotKind::backward_weight) letter('A');
    }
    return letters;
  };
  EXPECT_EQ(text(config_of("gpipe"), 3, 1, 4), "0123aAbBcCdD");
  EXPECT_EQ(text(config_of("1f1b"), 3, 0, 4), "012aA3bBcCdD");
  EXPECT_EQ(text(config_of("1f1b"), 3, 2, 4), "0aA1bB2cC3dD");
  EXPECT_EQ(text(config_of("interleaved", 2), 2, 1, 2), "010aA1bBaAbB");
  EXPECT_EQ(text(config_of("zb-h1"), 3, 0, 4), "012aA3bBcCdD");
  EXPECT_EQ(text(config_of("zb-h1"), 3, 1, 4), "01a2bA3cBdCD");
  EXPECT_EQ(text(config_of("zb-h1"), 3, 2, 4), "0a1b2cA3dBCD");
  EXPECT_EQ(text(config_of("zb-v", 2), 2, 0, 4), "0120aA1abA3bB2cBCcC3dDdD");
}

// F = 1, B = I + W = 2 in all that follows.
TEST(PipelineBubble, OfGpipeAnd1f1bIsOfPMinus1WaitsInMPlusPMinus1) {
  for (const std::string schedule : {"gpipe", "1f1b"}) {
    for_each_size(config_of(schedule), [&](int ranks, int micro_batches) {
      const double expected = (ranks - 1.0) / (micro_batches + ranks - 1.0);
      ASSERT_NEAR(facts_of(config_of(schedule), ranks, micro_batches).bubble_share, expected, 1e-12);
    });
  }
}

TEST(PipelineBubble, OfInterleavedShrinksWithItsChunks) {
  for (const int chunks : {1, 2, 3, 4}) {
    const PipelineConfig config = config_of("interleaved", chunks);
    for_each_size(config, [&](int ranks, int micro_batches) {
      const double expected = (ranks - 1.0) / (chunks * micro_batches + ranks - 1.0);
      ASSERT_NEAR(facts_of(config, ranks, micro_batches).bubble_share, expected, 1e-12);
    });
  }
}

TEST(PipelineBubble, OfZeroBubbleH1IsAThirdOf1f1bs) {
  for_each_size(config_of("zb-h1"), [&](int ranks, int micro_batches) {
    const ScheduleFacts facts = facts_of(config_of("zb-h1"), ranks, micro_batches);
    const ScheduleFacts plain = facts_of(config_of("1f1b"), ranks, micro_batches);
    if (micro_batches >= ranks) {
      ASSERT_DOUBLE_EQ(facts.makespan, 3 * micro_batches + ranks - 1);
    }
    if (ranks > 1) {
      ASSERT_LT(facts.bubble_share, plain.bubble_share);
    }
  });
}

TEST(PipelineBubble, OfZeroBubbleVIsTheTimeToReachTheLastRank) {
  for_each_size(config_of("zb-v", 2), [&](int ranks, int micro_batches) {
    if (micro_batches < 2 * ranks) return;
    const int extra = ranks >= 10 && ranks % 2 == 0 ? 2 : 0;
    ASSERT_DOUBLE_EQ(facts_of(config_of("zb-v", 2), ranks, micro_batches).makespan, 6 * micro_batches + ranks - 1 + extra);
  });
}

// The same model on as many ranks: a chunk of zb-v is half of what a rank holds.
TEST(PipelineBubble, OfZeroBubbleVIsLessThanHalfOfH1s) {
  for (const int ranks : {2, 4, 8}) {
    const double h1 = facts_of(config_of("zb-h1"), ranks, 2 * ranks, {2, 2, 2}).bubble_share;
    EXPECT_LT(facts_of(config_of("zb-v", 2), ranks, 2 * ranks).bubble_share, 0.55 * h1) << ranks;
  }
}

TEST(PipelineInFlight, IsAsDocumented) {
  for (const PipelineConfig& config : all_configs()) {
    for_each_size(config, [&](int p, int m) {
      const ScheduleFacts facts = facts_of(config, p, m);
      const int v = config.chunks;
      for (int rank = 0; rank < p; ++rank) {
        const int peak = facts.peak_in_flight[static_cast<std::size_t>(rank)];
        if (config.schedule == "gpipe") {
          ASSERT_EQ(peak, m);
        }
        if (config.schedule == "1f1b") {
          ASSERT_EQ(peak, std::min(m, p - rank));
        }
        if (config.schedule == "interleaved") {
          ASSERT_EQ(peak, std::min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1));
        }
        if (config.schedule == "zb-h1") {
          ASSERT_EQ(peak, std::min(m, p));
        }
        if (config.schedule == "zb-v") {
          ASSERT_LE(peak, std::min(2 * p, 2 * m));
        }
      }
      if (config.schedule == "zb-v" && m >= 2 * p) {
        ASSERT_EQ(worst(facts.peak_in_flight), 2 * p);
      }
    });
  }
}

TEST(ScheduleReplay, HandComputedTwoRanks) {
  const ScheduleFacts facts = facts_of(config_of("1f1b"), 2, 2, {1, 3, 2});

  // Rank 1: F0 1-2, B0 2-7, F1 7-8, B1 8-13. Rank 0: F0 0-1, F1 1-2, B0 7-12, B1 13-18.
  EXPECT_DOUBLE_EQ(facts.makespan, 18);
  EXPECT_DOUBLE_EQ(facts.bubble_share, 1 - 24.0 / 36);
  EXPECT_EQ(facts.peak_in_flight, (std::vector<int>{2, 1}));
  EXPECT_EQ(facts.gaps, (std::vector<double>{6, 0}));
}

TEST(ScheduleReplay, RefusesRanksThatWaitForEachOther) {
  Orders orders = orders_of(config_of("1f1b"), 2, 2);
  std::swap(orders[0][1], orders[0][2]);  // rank 0: F0 B0 F1 B1
  std::swap(orders[1][1], orders[1][2]);  // rank 1: F0 F1 B0 B1

  try {
    (void)replay_schedule(config_of("1f1b"), orders, {});
    FAIL() << "no error";
  } catch (const ContractError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 0 is stuck at backward chunk 0 mb 0"), std::string::npos) << error.what();
  }
}

TEST(PipelineOrder, RefusesWhatTheScheduleCannotDo) {
  EXPECT_THROW((void)pipeline_order(config_of("round-robin"), 2, 0, 2), ContractError);
  EXPECT_THROW((void)pipeline_order(config_of("gpipe", 2), 2, 0, 2), ContractError);
  EXPECT_THROW((void)pipeline_order(config_of("zb-v", 1), 2, 0, 2), ContractError);
  EXPECT_THROW((void)pipeline_order(config_of("interleaved", 2), 2, 0, 3), ContractError);
  EXPECT_THROW((void)pipeline_order(config_of("1f1b"), 2, 2, 2), ContractError);
}

}  // namespace
}  // namespace tandem

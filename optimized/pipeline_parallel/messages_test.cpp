// SPDX-License-Identifier: Apache-2.0
#include "optimized/pipeline_parallel/messages.h"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

using Orders = std::vector<std::vector<PipelineSlot>>;

Orders orders_of(const PipelineConfig& config, int ranks, int micro_batches) {
  Orders orders;
  for (int rank = 0; rank < ranks; ++rank) orders.push_back(pipeline_order(config, ranks, rank, micro_batches));
  return orders;
}

PipelineLayout layout_of(const PipelineConfig& config, int ranks) {
  return {ranks, config.chunks, config.schedule == "zb-v", {}};
}

// What a slot of this rank waits for, if another rank sends it.
std::vector<PipelineMessage> needs(const PipelineLayout& layout, int rank, const PipelineSlot& slot) {
  const int stage = layout.stage_of(rank, slot.chunk);
  const bool backward = slot.kind != SlotKind::forward;
  const int from = stage + (backward ? 1 : -1);
  if (slot.kind == SlotKind::backward_weight || from < 0 || from >= layout.stages()) return {};
  if (layout.rank_of_stage(from) == rank) return {};
  return {{backward, stage, slot.micro_batch}};
}

TEST(PipelineMessages, AreReceivedInTheOrderInWhichTheyAreSentAndInTime) {
  for (const PipelineConfig& config :
       {PipelineConfig{"gpipe", 1, ""}, PipelineConfig{"1f1b", 1, ""}, PipelineConfig{"interleaved", 3, ""},
        PipelineConfig{"zb-h1", 1, ""}, PipelineConfig{"zb-v", 2, ""}}) {
    for (const int ranks : {2, 3, 4, 8}) {
      SCOPED_TRACE(config.schedule + " on " + std::to_string(ranks));
      const Orders orders = orders_of(config, ranks, 2 * ranks);
      const PipelineLayout layout = layout_of(config, ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        PipelineMessages messages(layout, orders, rank, false);
        std::vector<std::vector<PipelineMessage>> received(static_cast<std::size_t>(ranks));
        std::vector<PipelineMessage> here;
        for (const PipelineSlot& slot : orders[static_cast<std::size_t>(rank)]) {
          for (const PipelineMessage& needed : needs(layout, rank, slot)) {
            for (const auto& [message, from] : messages.receive_until(needed)) {
              received[static_cast<std::size_t>(from)].push_back(message);
              here.push_back(message);
            }
            ASSERT_EQ(std::count(here.begin(), here.end(), needed), 1);
          }
        }
        for (int from = 0; from < ranks; ++from) {
          std::vector<PipelineMessage> sent;
          for (const auto& [to, message] : sent_messages(layout, orders[static_cast<std::size_t>(from)], from)) {
            if (to == rank) sent.push_back(message);
          }
          ASSERT_TRUE(received[static_cast<std::size_t>(from)] == sent) << from << " to " << rank;
        }
      }
    }
  }
}

// In a V activations and gradients travel both ways between two ranks, and some come before they are needed. In the other
// schedules none does.
TEST(PipelineMessages, MayComeBeforeTheyAreNeeded) {
  const PipelineConfig config{"zb-v", 2, ""};
  const Orders orders = orders_of(config, 2, 4);
  const PipelineLayout layout = layout_of(config, 2);
  std::size_t most = 0;
  for (int rank = 0; rank < 2; ++rank) {
    PipelineMessages messages(layout, orders, rank, false);
    PipelineMessages in_need_order(layout, orders, rank, true);
    for (const PipelineSlot& slot : orders[static_cast<std::size_t>(rank)]) {
      for (const PipelineMessage& needed : needs(layout, rank, slot)) {
        most = std::max(most, messages.receive_until(needed).size());
        EXPECT_EQ(in_need_order.receive_until(needed).size(), 1U);
      }
    }
  }
  EXPECT_GT(most, 1U);
}

TEST(PipelineMessages, StayOnTheRankAtTheTurnOfAV) {
  const PipelineConfig config{"zb-v", 2, ""};
  const PipelineLayout layout = layout_of(config, 3);
  const auto order = pipeline_order(config, 3, 2, 4);  // holds stages 2 and 3
  for (const auto& [to, message] : sent_messages(layout, order, 2)) {
    EXPECT_EQ(to, 1);
    EXPECT_TRUE(message.stage == (message.backward ? 1 : 4)) << message.stage;
  }
}

TEST(PipelineMessages, RefusesWhatNobodySends) {
  const PipelineConfig config{"1f1b", 1, ""};
  PipelineMessages messages(layout_of(config, 2), orders_of(config, 2, 1), 1, false);
  EXPECT_THROW((void)messages.receive_until({false, 1, 5}), ContractError);
}

}  // namespace
}  // namespace tandem

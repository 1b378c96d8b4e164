// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "core/pipeline_layout.h"
#include "optimized/pipeline_parallel/schedule.h"

namespace tandem {

/// One message between pipeline ranks: the activation of a micro-batch that enters `stage` from the one before, or the gradient
/// of the stage's output that enters it from the one after.
struct PipelineMessage {
  bool backward = false;
  int stage = 0;
  int micro_batch = 0;
  friend bool operator==(const PipelineMessage&, const PipelineMessage&) = default;
};

/// Messages that pipeline rank `rank` sends, in order, with their receiving rank: after a forward slot to the next stage and
/// after the input part of a backward slot to the previous one, unless there is none or it is its own.
[[nodiscard]] std::vector<std::pair<int, PipelineMessage>> sent_messages(const PipelineLayout& layout,
                                                                         const std::vector<PipelineSlot>& slots, int rank);

/// What one pipeline rank must receive, and when. Two ranks that are neighbours in both directions (several stages of each, or a
/// V) exchange several kinds of messages, and a transport without tags pairs them in order. So a rank receives from each
/// neighbour in the order in which that neighbour sends, whatever it needs first: the neighbour's own schedule tells the order.
class PipelineMessages {
 public:
  /// `slots` of every pipeline rank. in_need_order: planted, receives in the order of use.
  PipelineMessages(const PipelineLayout& layout, const std::vector<std::vector<PipelineSlot>>& slots, int rank,
                   bool in_need_order);

  struct Arrival {
    PipelineMessage message;
    int from = 0;  ///< pipeline rank
  };
  /// What must be received now, in this order, so that `needed` is there; empty where it has come already.
  [[nodiscard]] std::vector<Arrival> receive_until(const PipelineMessage& needed);

 private:
  PipelineLayout layout_;
  int rank_;
  bool in_need_order_;
  std::map<int, std::deque<PipelineMessage>> expected_;  // by sending pipeline rank
  std::vector<PipelineMessage> early_;                   // received before they were needed
};

}  // namespace tandem

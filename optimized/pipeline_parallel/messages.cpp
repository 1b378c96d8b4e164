// SPDX-License-Identifier: Apache-2.0
#include "optimized/pipeline_parallel/messages.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

std::vector<std::pair<int, PipelineMessage>> sent_messages(const PipelineLayout& layout, const std::vector<PipelineSlot>& slots,
                                                           int rank) {
  std::vector<std::pair<int, PipelineMessage>> sent;
  for (const PipelineSlot& slot : slots) {
    if (slot.kind == SlotKind::backward_weight) continue;
    const bool backward = slot.kind != SlotKind::forward;
    const int next = layout.stage_of(rank, slot.chunk) + (backward ? -1 : 1);
    if (next < 0 || next >= layout.stages()) continue;
    const int to = layout.rank_of_stage(next);
    if (to != rank) sent.emplace_back(to, PipelineMessage{backward, next, slot.micro_batch});
  }
  return sent;
}

PipelineMessages::PipelineMessages(const PipelineLayout& layout, const std::vector<std::vector<PipelineSlot>>& slots, int rank,
                                   bool in_need_order)
    : layout_(layout), rank_(rank), in_need_order_(in_need_order) {
  for (int from = 0; from < layout.ranks; ++from) {
    for (const auto& [to, message] : sent_messages(layout, slots[static_cast<std::size_t>(from)], from)) {
      if (to == rank) expected_[from].push_back(message);
    }
  }
}

std::vector<PipelineMessages::Arrival> PipelineMessages::receive_until(const PipelineMessage& needed) {
  const int from = layout_.rank_of_stage(needed.stage + (needed.backward ? 1 : -1));
  if (in_need_order_) return {{needed, from}};
  if (const auto found = std::find(early_.begin(), early_.end(), needed); found != early_.end()) {
    early_.erase(found);
    return {};
  }
  std::deque<PipelineMessage>& queue = expected_[from];
  std::vector<Arrival> arrivals;
  while (true) {
    TANDEM_CHECK(!queue.empty(), fmt::format("pipeline rank {} waits for a message that rank {} does not send", rank_, from));
    arrivals.push_back({queue.front(), from});
    queue.pop_front();
    if (arrivals.back().message == needed) return arrivals;
    early_.push_back(arrivals.back().message);
  }
}

}  // namespace tandem

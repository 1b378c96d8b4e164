// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/pipeline_parallel/schedule_replay_test_support.h"

namespace tandem {
namespace {

using Slots = std::vector<PipelineSlot>;

class ScheduleReplay {
 public:
  ScheduleReplay(const PipelineConfig& config, const std::vector<Slots>& orders, SlotCosts costs)
      : layout_{static_cast<int>(orders.size()), config.chunks, config.schedule == "zb-v", {}}, orders_(orders), costs_(costs) {
    for (const Slots& order : orders) {
      for (const PipelineSlot& slot : order) micro_batches_ = std::max(micro_batches_, slot.micro_batch + 1);
    }
    const auto places = static_cast<std::size_t>(layout_.stages() * micro_batches_);
    forward_end_.assign(places, kNever);
    input_end_.assign(places, kNever);
  }

  ScheduleFacts run() {
    const std::size_t ranks = orders_.size();
    std::vector<std::size_t> next(ranks, 0);
    std::vector<double> clock(ranks, 0), work(ranks, 0), begin(ranks, 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        for (; next[rank] < orders_[rank].size(); ++next[rank], moved = true) {
          const PipelineSlot& slot = orders_[rank][next[rank]];
          const double ready = ready_at(static_cast<int>(rank), slot);
          if (ready == kNever) break;
          const double start = std::max(clock[rank], ready);
          if (next[rank] == 0) begin[rank] = start;
          clock[rank] = start + cost(slot.kind);
          work[rank] += cost(slot.kind);
          finish(static_cast<int>(rank), slot, clock[rank]);
        }
      }
    }
    ScheduleFacts facts;
    double total_work = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      TANDEM_CHECK(next[rank] == orders_[rank].size(),
                   fmt::format("pipeline rank {} is stuck at {}", rank, describe(rank, next[rank])));
      facts.makespan = std::max(facts.makespan, clock[rank]);
      facts.gaps.push_back(clock[rank] - begin[rank] - work[rank]);
      facts.peak_in_flight.push_back(peak_in_flight(orders_[rank]));
      total_work += work[rank];
    }
    if (facts.makespan > 0) facts.bubble_share = 1 - total_work / (static_cast<double>(ranks) * facts.makespan);
    return facts;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  [[nodiscard]] std::size_t place(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage * micro_batches_ + micro_batch);
  }

  [[nodiscard]] double cost(SlotKind kind) const {
    switch (kind) {
      case SlotKind::forward: return costs_.forward;
      case SlotKind::backward: return costs_.backward_input + costs_.backward_weight;
      case SlotKind::backward_input: return costs_.backward_input;
      case SlotKind::backward_weight: return costs_.backward_weight;
    }
    return 0;
  }

  // When all that the slot needs is there; kNever while it has not been made.
  [[nodiscard]] double ready_at(int rank, const PipelineSlot& slot) const {
    const int stage = layout_.stage_of(rank, slot.chunk);
    const double own_forward = forward_end_[place(stage, slot.micro_batch)];
    if (slot.kind == SlotKind::forward) return stage == 0 ? 0 : forward_end_[place(stage - 1, slot.micro_batch)];
    if (slot.kind == SlotKind::backward_weight) return input_end_[place(stage, slot.micro_batch)];
    return stage + 1 == layout_.stages() ? own_forward : std::max(own_forward, input_end_[place(stage + 1, slot.micro_batch)]);
  }

  void finish(int rank, const PipelineSlot& slot, double at) {
    const int stage = layout_.stage_of(rank, slot.chunk);
    if (slot.kind == SlotKind::forward) forward_end_[place(stage, slot.micro_batch)] = at;
    if (slot.kind == SlotKind::backward || slot.kind == SlotKind::backward_input) {
      input_end_[place(stage, slot.micro_batch)] = at;
    }
  }

  [[nodiscard]] std::string describe(std::size_t rank, std::size_t next) const {
    if (next >= orders_[rank].size()) return "its end";
    const PipelineSlot& slot = orders_[rank][next];
    return fmt::format("{} chunk {} mb {}", name(slot.kind), slot.chunk, slot.micro_batch);
  }

  static int peak_in_flight(const Slots& order) {
    int now = 0;
    int peak = 0;
    for (const PipelineSlot& slot : order) {
      if (slot.kind == SlotKind::forward) ++now;
      if (slot.kind == SlotKind::backward || slot.kind == SlotKind::backward_weight) --now;
      peak = std::max(peak, now);
    }
    return peak;
  }

  PipelineLayout layout_;
  const std::vector<Slots>& orders_;
  SlotCosts costs_;
  int micro_batches_ = 0;
  std::vector<double> forward_end_, input_end_;  // [stages * micro_batches]
};

}  // namespace

ScheduleFacts replay_schedule(const PipelineConfig& config, const std::vector<std::vector<PipelineSlot>>& orders,
                              SlotCosts costs) {
  return ScheduleReplay(config, orders, costs).run();
}

}  // namespace tandem

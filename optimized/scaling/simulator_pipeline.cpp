// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/simulator_pipeline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

using Slots = std::vector<PipelineSlot>;

// "zb-2p" (ZB-H2 of Qi et al.), which the engine does not have: a list scheduler with one chunk, F = I = W = 1, that keeps up to
// 2 p - 1 micro-batches in flight. A rank prefers input parts, then forwards, then weight parts.
std::vector<Slots> zero_bubble_2p(int ranks, int micro_batches) {
  const auto count = static_cast<std::size_t>(ranks);
  std::vector<int> forwards(count, 0), inputs(count, 0), weights(count, 0);
  std::vector<Slots> orders(count);
  for (bool moved = true; moved;) {
    moved = false;
    const std::vector<int> forwards_before = forwards, inputs_before = inputs;
    for (std::size_t rank = 0; rank < count; ++rank) {
      const bool last = rank + 1 == count;
      Slots& order = orders[rank];
      const int sooner = 2 * (ranks - static_cast<int>(rank)) - 1;
      if (inputs[rank] < forwards_before[rank] && (last || inputs_before[rank + 1] > inputs[rank])) {
        order.push_back({SlotKind::backward_input, 0, inputs[rank]++});
      } else if (forwards[rank] < micro_batches && forwards[rank] - inputs[rank] < sooner &&
                 forwards[rank] - weights[rank] < 2 * ranks - 1 && (rank == 0 || forwards_before[rank - 1] > forwards[rank])) {
        order.push_back({SlotKind::forward, 0, forwards[rank]++});
      } else if (weights[rank] < inputs[rank]) {
        order.push_back({SlotKind::backward_weight, 0, weights[rank]++});
      } else {
        continue;
      }
      moved = true;
    }
  }
  return orders;
}

// When something ends: with messages that take their time, and with free ones.
struct Ends {
  double real = kNever, free = kNever;
};

class Player {
 public:
  Player(const PipelineConfig& config, const PipelineLayout& layout, int micro_batches, const PipelineTimes& times)
      : layout_(layout),
        times_(times),
        micro_batches_(static_cast<std::size_t>(micro_batches)),
        unsynchronized_(config.schedule == "zb-2p"),
        orders_(unsynchronized_ ? zero_bubble_2p(layout.ranks, micro_batches)
                                : pipeline_orders(config, layout.ranks, micro_batches)) {
    const auto stages = static_cast<std::size_t>(layout.stages());
    forward_.resize(stages * micro_batches_);
    input_.resize(stages * micro_batches_);
    clock_.assign(orders_.size(), {0, 0});
    begin_.assign(orders_.size(), {0, 0});
    stage_end_.assign(stages, 0);
  }

  PipelinePlay run() {
    std::vector<std::size_t> next(orders_.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < orders_.size(); ++rank) {
        const std::size_t before = next[rank];
        work(rank, next[rank]);
        moved = moved || next[rank] != before;
      }
    }
    PipelinePlay play;
    for (std::size_t rank = 0; rank < orders_.size(); ++rank) {
      TANDEM_CHECK(next[rank] == orders_[rank].size(), fmt::format("pipeline rank {} is stuck at slot {}", rank, next[rank]));
      // Of "zb-2p" a rank begins its next step when it ends this one: the update is checked afterwards, nothing waits for all.
      const Ends from = unsynchronized_ ? begin_[rank] : Ends{0, 0};
      play.rank_end.push_back(clock_[rank].real - from.real);
      play.rank_end_with_free_messages.push_back(clock_[rank].free - from.free);
    }
    play.stage_end = stage_end_;
    return play;
  }

  // Seconds by which each of the last micro-batches before the end comes later than the one `period` before it, if that is the
  // same for as many micro-batches as can depend on each other (`reach`, and a period), on all stages.
  [[nodiscard]] std::optional<Ends> period_seconds(int period, int reach) const {
    std::optional<Ends> first;
    const int count = static_cast<int>(micro_batches_);
    const int window = reach + period;
    if (count < 2 * window + period + reach) return std::nullopt;
    for (const std::vector<Ends>* times : {&forward_, &input_}) {
      // Forwards end with the steady state, backwards go on after it.
      const int end = times == &forward_ ? count : count - reach;
      for (int stage = 0; stage < layout_.stages(); ++stage) {
        for (int i = end - window; i < end; ++i) {
          const Ends later = (*times)[place(stage, i)], before = (*times)[place(stage, i - period)];
          const Ends step{later.real - before.real, later.free - before.free};
          if (!first) first = step;
          const bool same =
              std::abs(step.real - first->real) <= 1e-13 * later.real && std::abs(step.free - first->free) <= 1e-13 * later.free;
          if (!same) return std::nullopt;
        }
      }
    }
    return first;
  }

 private:
  [[nodiscard]] std::size_t place(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * micro_batches_ + static_cast<std::size_t>(micro_batch);
  }

  void work(std::size_t rank, std::size_t& next) {
    const Slots& order = orders_[rank];
    Ends& clock = clock_[rank];
    for (; next < order.size(); ++next) {
      const PipelineSlot& slot = order[next];
      const int stage = layout_.stage_of(static_cast<int>(rank), slot.chunk);
      const Ends ready = ready_at(stage, slot);
      if (ready.real == kNever) return;
      const Ends start{std::max(clock.real, ready.real), std::max(clock.free, ready.free)};
      if (next == 0) begin_[rank] = start;
      const double taken = seconds(stage, slot.kind);
      clock = {start.real + taken, start.free + taken};
      finish(stage, slot, clock);
      if (times_.sender_waits) clock.real += sending(stage, slot.kind);
    }
  }

  [[nodiscard]] Ends ready_at(int stage, const PipelineSlot& slot) const {
    const std::size_t here = place(stage, slot.micro_batch);
    if (slot.kind == SlotKind::backward_weight) return input_[here];
    if (slot.kind == SlotKind::forward) {
      if (stage == 0) return {0, 0};
      const Ends& sent = forward_[place(stage - 1, slot.micro_batch)];
      return {sent.real + hop(stage - 1), sent.free};
    }
    const Ends& own = forward_[here];
    if (stage + 1 == layout_.stages()) return own;
    const Ends& sent = input_[place(stage + 1, slot.micro_batch)];
    return {std::max(own.real, sent.real + hop(stage)), std::max(own.free, sent.free)};
  }

  void finish(int stage, const PipelineSlot& slot, Ends at) {
    stage_end_[static_cast<std::size_t>(stage)] = at.real;
    if (slot.kind == SlotKind::forward) forward_[place(stage, slot.micro_batch)] = at;
    if (slot.kind == SlotKind::backward || slot.kind == SlotKind::backward_input) input_[place(stage, slot.micro_batch)] = at;
  }

  [[nodiscard]] double seconds(int stage, SlotKind kind) const {
    const auto at = static_cast<std::size_t>(stage);
    switch (kind) {
      case SlotKind::forward: return times_.forward[at];
      case SlotKind::backward_input: return times_.backward_input[at];
      case SlotKind::backward_weight: return times_.backward_weight[at];
      case SlotKind::backward: return times_.backward_input[at] + times_.backward_weight[at];
    }
    return 0;
  }

  [[nodiscard]] double hop(int stage) const { return times_.hop[static_cast<std::size_t>(stage)]; }

  [[nodiscard]] double sending(int stage, SlotKind kind) const {
    if (kind == SlotKind::backward_weight) return 0;
    if (kind == SlotKind::forward) return stage + 1 < layout_.stages() ? hop(stage) : 0;
    return stage > 0 ? hop(stage - 1) : 0;
  }

  const PipelineLayout& layout_;
  const PipelineTimes& times_;
  std::size_t micro_batches_;
  bool unsynchronized_;
  std::vector<Slots> orders_;
  std::vector<Ends> forward_, input_;  // [stages * micro_batches] of forward and backward (its input part)
  std::vector<Ends> clock_, begin_;    // [ranks] now; start of the first slot
  std::vector<double> stage_end_;
};

}  // namespace

double PipelinePlay::end() const { return *std::max_element(rank_end.begin(), rank_end.end()); }

PipelinePlay play_whole_pipeline(const PipelineConfig& config, const PipelineLayout& layout, int micro_batches,
                                 const PipelineTimes& times) {
  return Player(config, layout, micro_batches, times).run();
}

PipelinePlay play_pipeline(const PipelineConfig& config, const PipelineLayout& layout, int micro_batches,
                           const PipelineTimes& times) {
  const std::string_view schedule = config.effective_schedule();
  const int period = schedule == "interleaved" ? layout.ranks : 1;
  const int reach = schedule == "1f1b" ? layout.ranks : 2 * layout.ranks;
  const bool steady = schedule == "1f1b" || schedule == "interleaved" || schedule == "zb-h1";
  for (int shorter = 4 * (reach + period); steady && layout.ranks > 1 && shorter * 3 / 2 < micro_batches; shorter *= 2) {
    const int played = shorter + (micro_batches - shorter) % period;
    Player player(config, layout, played, times);
    PipelinePlay play = player.run();
    const auto seconds = player.period_seconds(period, reach);
    if (!seconds) continue;
    const double periods = (micro_batches - played) / period;
    for (double& end : play.rank_end) end += seconds->real * periods;
    for (double& end : play.rank_end_with_free_messages) end += seconds->free * periods;
    for (double& end : play.stage_end) end += seconds->real * periods;
    return play;
  }
  return play_whole_pipeline(config, layout, micro_batches, times);
}

}  // namespace tandem

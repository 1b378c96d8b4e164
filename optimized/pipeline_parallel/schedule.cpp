// SPDX-License-Identifier: Apache-2.0
#include "optimized/pipeline_parallel/schedule.h"

#include <algorithm>
#include <array>
#include <optional>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

using Slots = std::vector<PipelineSlot>;

Slots gpipe(int micro_batches) {
  Slots slots;
  for (const SlotKind kind : {SlotKind::forward, SlotKind::backward}) {
    for (int i = 0; i < micro_batches; ++i) slots.push_back({kind, 0, i});
  }
  return slots;
}

// Slot k of `ranks` ranks with `chunks` chunks each: rounds of `ranks` micro-batches through every chunk.
PipelineSlot in_rounds(SlotKind kind, int k, int ranks, int chunks) {
  const int passed = k % (ranks * chunks) / ranks;
  const int chunk = kind == SlotKind::forward ? passed : chunks - 1 - passed;
  return {kind, chunk, k / (ranks * chunks) * ranks + k % ranks};
}

Slots one_forward_one_backward(int ranks, int rank, int chunks, int micro_batches) {
  const int total = chunks * micro_batches;
  const int first = chunks == 1 ? ranks - rank - 1 : 2 * (ranks - rank - 1) + (chunks - 1) * ranks;
  const int warm_up = std::min(total, first);
  // One chunk knows no rounds: any number of micro-batches will do.
  const int round = chunks == 1 ? 1 : ranks;
  Slots slots;
  slots.reserve(2 * static_cast<std::size_t>(total));
  for (int k = 0; k < total + warm_up; ++k) {
    if (k < total) slots.push_back(in_rounds(SlotKind::forward, k, round, chunks));
    if (k >= warm_up) slots.push_back(in_rounds(SlotKind::backward, k - warm_up, round, chunks));
  }
  return slots;
}

Slots zero_bubble_h1(int ranks, int rank, int micro_batches) {
  const int warm_up = std::min(micro_batches, ranks - rank - 1);
  Slots slots;
  int weights = 0;
  for (int i = 0; i < micro_batches + warm_up; ++i) {
    if (i < micro_batches) slots.push_back({SlotKind::forward, 0, i});
    const int input = i - warm_up;
    if (input < 0) continue;
    slots.push_back({SlotKind::backward_input, 0, input});
    // While forwards come in, weight parts lag by `rank`; afterwards one fills the wait for each input part.
    if (input >= rank || i >= micro_batches) slots.push_back({SlotKind::backward_weight, 0, weights++});
  }
  while (weights < micro_batches) slots.push_back({SlotKind::backward_weight, 0, weights++});
  return slots;
}

// The list scheduler of zb-v. All slots take one unit of time, and each kind of slot of a stage runs in the order of
// micro-batches, so that how many are done is the whole state.
class VScheduler {
 public:
  VScheduler(int ranks, int micro_batches)
      : layout_{ranks, 2, true, {}},
        micro_batches_(micro_batches),
        stages_(static_cast<std::size_t>(2 * ranks)),
        orders_(static_cast<std::size_t>(ranks)) {}

  std::vector<Slots> run() {
    while (true) {
      std::vector<std::pair<int, PipelineSlot>> chosen;  // by all ranks at the same moment, then done
      for (int rank = 0; rank < layout_.ranks; ++rank) {
        if (const auto slot = choose(rank)) chosen.emplace_back(rank, *slot);
      }
      if (chosen.empty()) break;
      for (const auto& [rank, slot] : chosen) {
        Done& done = stages_[static_cast<std::size_t>(layout_.stage_of(rank, slot.chunk))];
        ++(slot.kind == SlotKind::forward ? done.forwards : slot.kind == SlotKind::backward_input ? done.inputs : done.weights);
        orders_[static_cast<std::size_t>(rank)].push_back(slot);
      }
    }
    for (const Done& done : stages_) TANDEM_CHECK(done.weights == micro_batches_, "zb-v: the list scheduler is stuck");
    return std::move(orders_);
  }

 private:
  struct Done {
    int forwards = 0, inputs = 0, weights = 0;
    [[nodiscard]] int in_flight() const { return forwards - weights; }
  };

  [[nodiscard]] const Done& done(int stage) const { return stages_[static_cast<std::size_t>(stage)]; }

  [[nodiscard]] bool forward_ready(int rank, int chunk) const {
    const int stage = layout_.stage_of(rank, chunk);
    const int next = done(stage).forwards;
    const int first = done(layout_.stage_of(rank, 0)).in_flight();
    const int both = first + done(layout_.stage_of(rank, 1)).in_flight();
    if (both >= 2 * layout_.ranks || (chunk == 0 && first >= 2 * layout_.ranks - 1)) return false;
    return next < micro_batches_ && (stage == 0 || done(stage - 1).forwards > next);
  }

  [[nodiscard]] bool input_ready(int stage) const {
    const int next = done(stage).inputs;
    return next < done(stage).forwards && (stage + 1 == layout_.stages() || done(stage + 1).inputs > next);
  }

  [[nodiscard]] std::optional<PipelineSlot> choose(int rank) const {
    const std::array<int, 2> stage = {layout_.stage_of(rank, 0), layout_.stage_of(rank, 1)};
    if (forward_ready(rank, 1)) return PipelineSlot{SlotKind::forward, 1, done(stage[1]).forwards};
    for (const int chunk : {0, 1}) {
      const int at = stage[static_cast<std::size_t>(chunk)];
      if (input_ready(at)) return PipelineSlot{SlotKind::backward_input, chunk, done(at).inputs};
    }
    if (forward_ready(rank, 0)) return PipelineSlot{SlotKind::forward, 0, done(stage[0]).forwards};
    for (const int chunk : {0, 1}) {
      const Done& at = done(stage[static_cast<std::size_t>(chunk)]);
      if (at.weights < at.inputs) return PipelineSlot{SlotKind::backward_weight, chunk, at.weights};
    }
    return std::nullopt;
  }

  PipelineLayout layout_;
  int micro_batches_;
  std::vector<Done> stages_;
  std::vector<Slots> orders_;
};

}  // namespace

std::string_view name(SlotKind kind) {
  constexpr std::array<std::string_view, 4> kNames = {"forward", "backward", "backward_input", "backward_weight"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::vector<PipelineSlot> pipeline_order(const PipelineConfig& config, int ranks, int rank, int micro_batches) {
  const std::string_view schedule = config.effective_schedule();
  TANDEM_CHECK(ranks >= 1 && rank >= 0 && rank < ranks && micro_batches >= 1,
               fmt::format("rank {} of {}, {} micro-batches", rank, ranks, micro_batches));
  const bool interleaved = schedule == "interleaved";
  const bool v_shaped = schedule == "zb-v";
  const bool chunks_fit = interleaved ? config.chunks >= 1 : config.chunks == (v_shaped ? 2 : 1);
  TANDEM_CHECK(chunks_fit, fmt::format("schedule {} of {} chunks", schedule, config.chunks));
  if (schedule == "gpipe") return gpipe(micro_batches);
  if (schedule == "1f1b") return one_forward_one_backward(ranks, rank, 1, micro_batches);
  if (schedule == "zb-h1") return zero_bubble_h1(ranks, rank, micro_batches);
  if (v_shaped) return VScheduler(ranks, micro_batches).run()[static_cast<std::size_t>(rank)];
  TANDEM_CHECK(interleaved, fmt::format("there is no schedule '{}'", schedule));
  TANDEM_CHECK(micro_batches % ranks == 0, fmt::format("interleaved: {} micro-batches for {} ranks", micro_batches, ranks));
  return one_forward_one_backward(ranks, rank, config.chunks, micro_batches);
}

std::vector<std::vector<PipelineSlot>> pipeline_orders(const PipelineConfig& config, int ranks, int micro_batches) {
  // The list scheduler makes the orders of all ranks together.
  if (config.schedule == "zb-v" && config.chunks == 2) return VScheduler(ranks, micro_batches).run();
  std::vector<Slots> orders;
  for (int rank = 0; rank < ranks; ++rank) orders.push_back(pipeline_order(config, ranks, rank, micro_batches));
  return orders;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "core/process_grid.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "core/error.h"
#include "core/pipeline_layout.h"

namespace tandem {
namespace {

constexpr std::array<std::string_view, 4> kAxisNames = {"tensor", "context", "data", "pipeline"};

}  // namespace

std::string_view name(GroupAxis axis) {
  constexpr std::array<std::string_view, kGroupAxes> kNames = {"world",  "data",     "tensor",          "pipeline", "context",
                                                               "expert", "gradient", "expert_gradient", "model",    "embedding"};
  return kNames[static_cast<std::size_t>(axis)];
}

ProcessGrid::ProcessGrid(const TrainingPlan& plan) : degrees_(plan.parallel) {
  std::vector<Axis> order;
  const std::string_view text = plan.rank_order;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t dash = std::min(text.find('-', begin), text.size());
    const auto found = std::find(kAxisNames.begin(), kAxisNames.end(), text.substr(begin, dash - begin));
    if (found == kAxisNames.end()) {
      order.clear();
      break;
    }
    order.push_back(static_cast<Axis>(found - kAxisNames.begin()));
    begin = dash + 1;
  }
  std::vector<Axis> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != std::vector<Axis>{tensor, context, data, pipeline}) {
    throw InputError(
        fmt::format("rank_order '{}' must name tensor, context, data and pipeline once each, as in "
                    "tensor-context-data-pipeline",
                    plan.rank_order));
  }
  std::copy(order.begin(), order.end(), order_.begin());
  // Wrapped layouts end on the last pipeline rank, V-shaped ones on the first.
  first_stage_rank_ = 0;
  last_stage_rank_ = plan.pipeline.schedule == "zb-v" ? 0 : degrees_.pipeline - 1;
}

Coordinates ProcessGrid::coordinates(int rank) const {
  TANDEM_CHECK(rank >= 0 && rank < size(), fmt::format("rank {} of {}", rank, size()));
  const std::array<int, 4> extents = {degrees_.tensor, degrees_.context, degrees_.data, degrees_.pipeline};
  std::array<int, 4> place{};
  for (const Axis axis : order_) {
    place[axis] = rank % extents[axis];
    rank /= extents[axis];
  }
  return {place[tensor], place[context], place[data], place[pipeline]};
}

int ProcessGrid::rank_of(const Coordinates& at) const {
  const std::array<int, 4> extents = {degrees_.tensor, degrees_.context, degrees_.data, degrees_.pipeline};
  const std::array<int, 4> place = {at.tensor, at.context, at.data, at.pipeline};
  int rank = 0;
  for (std::size_t i = order_.size(); i-- > 0;) rank = rank * extents[order_[i]] + place[order_[i]];
  return rank;
}

std::vector<int> ProcessGrid::group(GroupAxis axis, int rank) const {
  const Coordinates mine = coordinates(rank);
  const int expert = degrees_.expert;
  const auto ends_pipeline = [&](int p) { return p == first_stage_rank_ || p == last_stage_rank_; };
  const auto shares = [&](const Coordinates& other) {
    const bool same_tensor = other.tensor == mine.tensor;
    const bool same_context = other.context == mine.context;
    const bool same_data = other.data == mine.data;
    const bool same_pipeline = other.pipeline == mine.pipeline;
    const bool same_experts = other.data % expert == mine.data % expert;
    const bool same_replica = other.data / expert == mine.data / expert;
    switch (axis) {
      case GroupAxis::world: return true;
      case GroupAxis::data: return same_tensor && same_context && same_pipeline;
      case GroupAxis::tensor: return same_context && same_data && same_pipeline;
      case GroupAxis::pipeline: return same_tensor && same_context && same_data;
      case GroupAxis::context: return same_tensor && same_data && same_pipeline;
      case GroupAxis::expert: return same_tensor && same_context && same_pipeline && same_replica;
      case GroupAxis::gradient: return same_tensor && same_pipeline;
      case GroupAxis::expert_gradient: return same_tensor && same_pipeline && same_experts;
      case GroupAxis::model: return same_context && same_replica;
      case GroupAxis::embedding:
        return same_tensor && same_context && same_data &&
               (same_pipeline || (ends_pipeline(mine.pipeline) && ends_pipeline(other.pipeline)));
    }
    return false;
  };
  std::vector<int> members;
  for (int d = 0; d < degrees_.data; ++d) {
    for (int p = 0; p < degrees_.pipeline; ++p) {
      for (int c = 0; c < degrees_.context; ++c) {
        for (int t = 0; t < degrees_.tensor; ++t) {
          const Coordinates other{t, c, d, p};
          if (shares(other)) members.push_back(rank_of(other));
        }
      }
    }
  }
  return members;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "reference/hybrid_parallel.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <tuple>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/pipeline_parallel.h"
#include "reference/tensor_parallel.h"

namespace tandem::reference {
namespace {

/// Where an axis keeps its place and its extent.
struct Axis {
  int Coordinates::*place;
  int extent;
};

std::vector<Axis> axes_in_order(const TrainingPlan& plan) {
  const ParallelDegrees& degrees = plan.parallel;
  const std::map<std::string, Axis> known = {{"tensor", {&Coordinates::tensor, degrees.tensor}},
                                             {"context", {&Coordinates::context, degrees.context}},
                                             {"data", {&Coordinates::data, degrees.data}},
                                             {"pipeline", {&Coordinates::pipeline, degrees.pipeline}}};
  std::vector<Axis> axes;
  std::string text = plan.rank_order + "-";
  for (std::size_t dash = text.find('-'); dash != std::string::npos; dash = text.find('-')) {
    const auto found = known.find(text.substr(0, dash));
    TANDEM_CHECK(found != known.end(), fmt::format("no axis '{}'", text.substr(0, dash)));
    axes.push_back(found->second);
    text.erase(0, dash + 1);
  }
  TANDEM_CHECK(axes.size() == known.size(), fmt::format("rank order '{}'", plan.rank_order));
  for (const auto& entry : known) {
    const auto names_it = [&](const Axis& axis) { return axis.place == entry.second.place; };
    TANDEM_CHECK(std::count_if(axes.begin(), axes.end(), names_it) == 1, fmt::format("rank order '{}'", plan.rank_order));
  }
  return axes;
}

/// What a rank has in common with the other members of its group: -1 stands for anything, -2 for either end of the pipeline.
using Common = std::array<int, 5>;  // tensor, context, pipeline, data, expert replica (data / E) or expert place (data % E)

Common common_of(const HybridGrid& grid, GroupAxis axis, const Coordinates& at) {
  constexpr int kAny = -1;
  constexpr int kEnd = -2;
  const int expert = grid.degrees.expert;
  const int last = grid.v_shaped ? 0 : grid.degrees.pipeline - 1;
  const bool is_end = at.pipeline == 0 || at.pipeline == last;
  switch (axis) {
    case GroupAxis::world: return {kAny, kAny, kAny, kAny, kAny};
    case GroupAxis::data: return {at.tensor, at.context, at.pipeline, kAny, kAny};
    case GroupAxis::tensor: return {kAny, at.context, at.pipeline, at.data, kAny};
    case GroupAxis::pipeline: return {at.tensor, at.context, kAny, at.data, kAny};
    case GroupAxis::context: return {at.tensor, kAny, at.pipeline, at.data, kAny};
    case GroupAxis::expert: return {at.tensor, at.context, at.pipeline, kAny, at.data / expert};
    case GroupAxis::gradient: return {at.tensor, kAny, at.pipeline, kAny, kAny};
    case GroupAxis::expert_gradient: return {at.tensor, kAny, at.pipeline, kAny, at.data % expert};
    case GroupAxis::model: return {kAny, at.context, kAny, kAny, at.data / expert};
    case GroupAxis::embedding: return {at.tensor, at.context, is_end ? kEnd : at.pipeline, at.data, kAny};
  }
  TANDEM_CHECK(false, "no such axis");
}

bool is_partial_over_tensor(const TrainingPlan& plan, const ParameterSpec& parameter) {
  if (tensor_split(parameter) != TensorSplit::replicated || plan.parallel.tensor == 1) return false;
  if (parameter.kind == ParameterKind::router) return true;
  return plan.sequence_parallel && parameter.expert < 0;
}

}  // namespace

HybridGrid hybrid_grid(const TrainingPlan& plan) {
  const std::vector<Axis> axes = axes_in_order(plan);  // fastest first
  HybridGrid grid{plan.parallel, plan.pipeline.schedule == "zb-v", {}};
  Coordinates at;
  for (at.*axes[3].place = 0; at.*axes[3].place < axes[3].extent; ++(at.*axes[3].place)) {
    for (at.*axes[2].place = 0; at.*axes[2].place < axes[2].extent; ++(at.*axes[2].place)) {
      for (at.*axes[1].place = 0; at.*axes[1].place < axes[1].extent; ++(at.*axes[1].place)) {
        for (at.*axes[0].place = 0; at.*axes[0].place < axes[0].extent; ++(at.*axes[0].place)) grid.ranks.push_back(at);
      }
    }
  }
  return grid;
}

std::vector<std::vector<int>> hybrid_groups(const HybridGrid& grid, GroupAxis axis) {
  std::map<Common, std::vector<int>> by_common;
  for (int r = 0; r < std::ssize(grid.ranks); ++r) {
    by_common[common_of(grid, axis, grid.ranks[static_cast<std::size_t>(r)])].push_back(r);
  }
  const auto place = [&](int rank) {
    const Coordinates& at = grid.ranks[static_cast<std::size_t>(rank)];
    return std::tuple(at.data, at.pipeline, at.context, at.tensor);
  };
  std::vector<std::vector<int>> groups;
  for (auto& [common, members] : by_common) {
    std::sort(members.begin(), members.end(), [&](int a, int b) { return place(a) < place(b); });
    groups.push_back(members);
  }
  return groups;
}

std::vector<int> hybrid_group(const HybridGrid& grid, GroupAxis axis, int rank) {
  for (const std::vector<int>& group : hybrid_groups(grid, axis)) {
    if (std::find(group.begin(), group.end(), rank) != group.end()) return group;
  }
  TANDEM_CHECK(false, fmt::format("rank {} of {}", rank, grid.ranks.size()));
}

bool holds(const HybridGrid& grid, const GptConfig& model, const PipelineLayout& stages, const ParameterSpec& parameter,
           int rank) {
  const Coordinates& at = grid.ranks.at(static_cast<std::size_t>(rank));
  const int experts_of_rank = model.experts / grid.degrees.expert;
  if (parameter.expert >= 0 && parameter.expert / experts_of_rank != at.data % grid.degrees.expert) return false;
  const std::vector<ParameterSpec> own = pipeline_parameters(model, stages, at.pipeline);
  return std::any_of(own.begin(), own.end(), [&](const ParameterSpec& other) { return other.name == parameter.name; });
}

std::vector<int> gradient_summands(const HybridGrid& grid, const TrainingPlan& plan, const GptConfig& model,
                                   const ParameterSpec& parameter, int rank) {
  const PipelineLayout stages = pipeline_layout(plan, model);
  if (!holds(grid, model, stages, parameter, rank)) return {};
  const int tensor_place = grid.ranks[static_cast<std::size_t>(rank)].tensor;
  std::vector<int> summands;
  for (int other = 0; other < std::ssize(grid.ranks); ++other) {
    // Another tensor rank holds another slice, or an equal copy, unless its copy's gradient is of other tokens.
    const bool counts =
        grid.ranks[static_cast<std::size_t>(other)].tensor == tensor_place || is_partial_over_tensor(plan, parameter);
    if (counts && holds(grid, model, stages, parameter, other)) summands.push_back(other);
  }
  return summands;
}

std::vector<GroupAxis> gradient_sums(const TrainingPlan& plan, const GptConfig& model, const ParameterSpec& parameter) {
  std::vector<GroupAxis> sums;
  if (is_partial_over_tensor(plan, parameter)) sums.push_back(GroupAxis::tensor);
  sums.push_back(parameter.expert >= 0 ? GroupAxis::expert_gradient : GroupAxis::gradient);
  if (parameter.name == "wte.weight" && has_two_embeddings(model, pipeline_layout(plan, model))) {
    sums.push_back(GroupAxis::embedding);
  }
  return sums;
}

}  // namespace tandem::reference

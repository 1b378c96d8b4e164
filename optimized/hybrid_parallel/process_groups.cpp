// SPDX-License-Identifier: Apache-2.0
#include "optimized/hybrid_parallel/process_groups.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

// The grid that groups are formed from. It must be the one that coordinates come from: a transposed one gives groups of the right
// sizes, whose members hold the wrong parts.
ProcessGrid grid_of_groups(const TrainingPlan& plan, const PitfallSet& pitfalls) {
  TrainingPlan numbered = plan;
  if (pitfalls.on(Pitfall::groups_from_transposed_grid)) numbered.rank_order = "data-context-tensor-pipeline";
  return ProcessGrid(numbered);
}

bool is_world(const std::vector<int>& members, int world_size) {
  std::vector<int> all(static_cast<std::size_t>(world_size));
  std::iota(all.begin(), all.end(), 0);
  return members == all;
}

}  // namespace

ProcessGroups::ProcessGroups(Communicator& world, const TrainingPlan& plan, const PitfallSet& pitfalls)
    : world_(world), grid_(plan) {
  TANDEM_CHECK(world.size() == grid_.size(),
               fmt::format("a plan for {} ranks on a communicator of {}", grid_.size(), world.size()));
  here_ = grid_.coordinates(world.rank());
  const ProcessGrid forming = grid_of_groups(plan, pitfalls);
  for (std::size_t i = 0; i < kGroupAxes; ++i) {
    const auto axis = static_cast<GroupAxis>(i);
    const std::vector<int> members = forming.group(axis, world.rank());
    sizes_[i] = static_cast<int>(members.size());
    bool any = false;  // a split concerns all ranks, though only some may get a group of several
    for (int rank = 0; rank < world.size() && !any; ++rank) any = forming.group(axis, rank).size() > 1;
    if (!any) continue;
    if (is_world(members, world.size())) {
      groups_[i] = &world_;
      continue;
    }
    const auto place = std::find(members.begin(), members.end(), world.rank()) - members.begin();
    owned_.push_back(world.split(members.front(), static_cast<int>(place)));
    if (sizes_[i] > 1) groups_[i] = owned_.back().get();
  }
}

Communicator& ProcessGroups::of(GroupAxis axis) const {
  Communicator* group = groups_[static_cast<std::size_t>(axis)];
  TANDEM_CHECK(group != nullptr, fmt::format("rank {} is alone along {}", rank(), name(axis)));
  return *group;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/zero/ownership.h"

#include <algorithm>

namespace tandem {
namespace {

void deal_units(Ownership& result, const TrainingPlan& plan, const ProcessGrid& grid, int rank) {
  for (const GradientBucket& unit : result.units) {
    const std::vector<int> group = grid.group(unit.axis(), rank);
    const int ranks = plan.zero_stage > 0 ? static_cast<int>(group.size()) : 1;
    const auto here = std::find(group.begin(), group.end(), rank) - group.begin();
    result.ranks.push_back(ranks);
    result.owned.push_back(balanced_part(unit.elements.size(), ranks, ranks == 1 ? 0 : here));
  }
  result.at.resize(result.units.size());
  for (std::size_t u = result.units.size(); u-- > 0;) {
    result.at[u] = result.elements;
    result.elements += result.owned[u].size();
  }
}

// Of the parameter whose first element is `first` of the unit; empty where another rank keeps all of it.
OwnedPart part_of(const Ownership& dealt, std::size_t index, const LocalParameter& parameter, std::int64_t first) {
  const auto u = static_cast<std::size_t>(dealt.unit_of[index]);
  const std::int64_t begin = std::max(dealt.owned[u].begin, first);
  const std::int64_t end = std::max(begin, std::min(dealt.owned[u].end, first + parameter.num_elements()));
  OwnedPart part{
      index, dealt.unit_of[index], {begin - first, end - first}, dealt.at[u] + begin - dealt.owned[u].begin, parameter.shard};
  if (dealt.ranks[u] > 1) {
    part.shard.flat_range = part.elements;
    part.shard.replica_index /= dealt.ranks[u];
    part.shard.replica_count /= dealt.ranks[u];
  }
  return part;
}

}  // namespace

std::int64_t Ownership::kept(Interval range) const {
  std::int64_t count = 0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const std::int64_t begin = std::max(range.begin, units[u].elements.begin + owned[u].begin);
    const std::int64_t end = std::min(range.end, units[u].elements.begin + owned[u].end);
    count += std::max<std::int64_t>(0, end - begin);
  }
  return count;
}

Ownership ownership(const std::vector<LocalParameter>& parameters, const TrainingPlan& plan, const ProcessGrid& grid, int rank) {
  Ownership result;
  result.units = parameter_units(parameters);
  deal_units(result, plan, grid, rank);
  result.unit_of.resize(parameters.size());
  for (std::size_t u = 0; u < result.units.size(); ++u) {
    const Interval held = result.units[u].parameters;
    std::fill(result.unit_of.begin() + held.begin, result.unit_of.begin() + held.end, static_cast<int>(u));
  }
  std::int64_t first = 0;  // of the flat order
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const GradientBucket& unit = result.units[static_cast<std::size_t>(result.unit_of[i])];
    OwnedPart part = part_of(result, i, parameters[i], first - unit.elements.begin);
    first += parameters[i].num_elements();
    if (part.elements.size() > 0) result.parts.push_back(std::move(part));
  }
  return result;
}

}  // namespace tandem

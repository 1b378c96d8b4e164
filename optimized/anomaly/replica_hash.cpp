// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/replica_hash.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tandem {
namespace {

enum class Sharing : std::uint8_t { dense, all_tensor_ranks, both_ends, expert };

std::uint64_t group_number(Sharing sharing, int pipeline, int tensor, int expert) {
  const auto part = [](int value, int bits) { return static_cast<std::uint64_t>(value) << bits; };
  return part(static_cast<int>(sharing), 60) | part(pipeline, 40) | part(tensor, 20) | part(expert, 0);
}

}  // namespace

std::uint64_t replica_group(const LocalParameter& parameter, const ProcessGrid& grid, int rank) {
  const Coordinates here = grid.coordinates(rank);
  if (parameter.expert()) return group_number(Sharing::expert, here.pipeline, here.tensor, grid.expert_coordinate(rank));
  if (parameter.tied_copy) return group_number(Sharing::both_ends, 0, here.tensor, 0);
  if (parameter.shard.is_whole()) return group_number(Sharing::all_tensor_ranks, here.pipeline, 0, 0);
  return group_number(Sharing::dense, here.pipeline, here.tensor, 0);
}

std::vector<CopyDivergence> compare_replicas(const std::vector<std::vector<GroupHash>>& by_rank, int here,
                                             const PitfallSet& pitfalls) {
  const bool itself = pitfalls.on(Pitfall::replica_compared_with_itself);
  std::map<std::uint64_t, std::vector<std::pair<int, std::uint64_t>>> groups;
  for (int rank = 0; rank < static_cast<int>(by_rank.size()); ++rank) {
    const int source = itself ? here : rank;
    for (const GroupHash& one : by_rank[static_cast<std::size_t>(source)]) groups[one.group].emplace_back(rank, one.hash);
  }
  std::vector<CopyDivergence> found;
  for (const auto& [group, members] : groups) {
    std::map<std::uint64_t, std::size_t> votes;
    for (const auto& [rank, hash] : members) ++votes[hash];
    if (votes.size() == 1) continue;
    const auto most = std::ranges::max_element(votes, {}, [](const auto& vote) { return vote.second; });
    const bool majority = 2 * most->second > members.size();
    CopyDivergence divergence;
    divergence.group = group;
    for (const auto& [rank, hash] : members) {
      divergence.ranks.push_back(rank);
      if (!majority || hash != most->first) divergence.odd.push_back(rank);
    }
    found.push_back(std::move(divergence));
  }
  return found;
}

std::string first_difference(const CopyDivergence& divergence,
                             const std::vector<std::vector<std::pair<std::string, std::uint64_t>>>& by_rank) {
  const auto& first = by_rank[static_cast<std::size_t>(divergence.ranks.front())];
  for (std::size_t i = 0; i < first.size(); ++i) {
    for (const int rank : divergence.ranks) {
      const auto& other = by_rank[static_cast<std::size_t>(rank)];
      if (i >= other.size() || other[i] != first[i]) return first[i].first;
    }
  }
  return {};
}

std::string name_ranks(const std::vector<int>& ranks) { return fmt::format("rank {}", fmt::join(ranks, " or ")); }

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "harness/replicas.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tandem {
namespace {

using Copies = std::vector<const ReplicaHash*>;

Finding finding(Status status, std::string reason) { return {status, "replica_hashes", std::move(reason), -1, {}}; }

std::optional<Finding> check_given(const Evidence& candidate) {
  const std::vector<std::uint64_t>& hashes = candidate.replica_hashes;
  const auto ranks = static_cast<std::size_t>(candidate.ranks);
  // Hashes of whole replicas may be left out where copies of parts are given.
  if (hashes.size() != ranks && !(hashes.empty() && !candidate.replicas.empty())) {
    return finding(Status::invalid,
                   fmt::format("{} gives replica hashes of {} of its {} ranks", candidate.side, hashes.size(), candidate.ranks));
  }
  if (candidate.replicas.empty()) return std::nullopt;
  std::set<int> seen;
  for (const ReplicaHash& copy : candidate.replicas) {
    if (copy.rank < 0 || copy.rank >= candidate.ranks) {
      return finding(Status::invalid, fmt::format("{} gives a copy of {} in rank {}, but has {} ranks", candidate.side,
                                                  copy.tensor, copy.rank, candidate.ranks));
    }
    seen.insert(copy.rank);
  }
  if (seen.size() == ranks) return std::nullopt;
  return finding(Status::invalid,
                 fmt::format("{} gives copies of tensors of {} of its {} ranks", candidate.side, seen.size(), candidate.ranks));
}

std::optional<Finding> check_whole(const Evidence& candidate, int last) {
  for (int rank = 0; rank < last && !candidate.replica_hashes.empty(); ++rank) {
    if (candidate.replica_hashes[static_cast<std::size_t>(rank)] == candidate.replica_hashes[0]) continue;
    return finding(Status::fail,
                   fmt::format("{}: gradients or parameters of rank {} are not those of rank 0", candidate.side, rank));
  }
  return std::nullopt;
}

// The copies that must be equal: stage by stage and in it tensor by tensor, both in order of appearance.
std::vector<Copies> groups_of(const Evidence& candidate, int last) {
  std::map<std::string, int> stages;
  for (const ReplicaHash& copy : candidate.replicas) stages.emplace(copy.stage, static_cast<int>(stages.size()));
  std::vector<Copies> groups;
  std::map<std::pair<std::string, std::string>, std::size_t> index;
  for (const auto& copy : candidate.replicas) {
    if (copy.rank >= last) continue;
    const auto [place, added] = index.try_emplace({copy.stage + '\n' + copy.tensor, copy.part}, groups.size());
    if (added) groups.emplace_back();
    groups[place->second].push_back(&copy);
  }
  std::ranges::stable_sort(groups, {}, [&](const Copies& copies) { return stages.at(copies.front()->stage); });
  return groups;
}

// What most copies are; of equally frequent ones, the one that the lowest rank holds.
std::uint64_t usual_hash(const Copies& copies) {
  std::map<std::uint64_t, std::ptrdiff_t> frequency;
  for (const ReplicaHash* copy : copies) ++frequency[copy->hash];
  const auto key = [&](const ReplicaHash* copy) { return std::pair{-frequency.at(copy->hash), copy->rank}; };
  return (*std::ranges::min_element(copies, {}, key))->hash;
}

std::optional<Finding> check_copies(const Evidence& candidate, int last) {
  for (const Copies& copies : groups_of(candidate, last)) {
    const std::uint64_t usual = usual_hash(copies);
    std::set<int> odd;
    std::set<int> even;
    for (const ReplicaHash* copy : copies) (copy->hash == usual ? even : odd).insert(copy->rank);
    if (odd.empty()) continue;
    const ReplicaHash& first = *copies.front();
    Finding found =
        finding(Status::fail,
                fmt::format("{}: copies of {} ({}) in stage {} differ: rank {} does not hold what rank {} holds", candidate.side,
                            first.tensor, first.part, first.stage, fmt::join(odd, ", "), fmt::join(even, ", ")));
    found.tensor = first.tensor;
    if (const StageEvidence* stage = find_stage(candidate, first.stage)) found.step = stage->step;
    return found;
  }
  return std::nullopt;
}

}  // namespace

ReplicaVerdict check_replicas(const Evidence& candidate, const PitfallSet& pitfalls) {
  if (candidate.ranks == 1 && candidate.replica_hashes.empty() && candidate.replicas.empty()) return {std::nullopt, 1};
  if (auto gap = check_given(candidate)) return {std::move(gap), 0};
  // Rank 0 agrees with itself: a verdict that is not reduced over all ranks misses what went wrong on the others.
  const int last = pitfalls.on(Pitfall::verdict_of_rank_zero) ? 1 : candidate.ranks;
  if (auto odd = check_whole(candidate, last)) return {std::move(odd), last};
  return {check_copies(candidate, last), last};
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/pitfall.h"
#include "core/process_grid.h"
#include "optimized/hybrid_parallel/parameter_layout.h"

namespace tandem {

/// Which ranks hold the same values of a parameter: those for which this number is the same. Dense parameters: the ranks that
/// differ in rows or context alone (GroupAxis::gradient); those that every tensor rank holds whole, also these; a tied embedding,
/// both ends of the pipeline; experts: GroupAxis::expert_gradient.
[[nodiscard]] std::uint64_t replica_group(const LocalParameter& parameter, const ProcessGrid& grid, int rank);

/// A hash of all that a rank keeps whole of one group's parameters, in the order of state_pieces().
struct GroupHash {
  std::uint64_t group = 0;
  std::uint64_t hash = 0;
  friend bool operator==(const GroupHash&, const GroupHash&) = default;
};
template <class Archive>
void serialize(Archive& archive, GroupHash& one) {
  archive(one.group, one.hash);
}

/// A group whose ranks do not hold the same.
struct CopyDivergence {
  std::uint64_t group = 0;
  std::vector<int> ranks;  ///< of the group, ascending
  /// That differ from what more than half of them hold; all of them where no more than half agree: with two copies it cannot be
  /// said which one is wrong.
  std::vector<int> odd;
  [[nodiscard]] bool is_named() const noexcept { return odd.size() < ranks.size(); }
};

/// `by_rank`: of every rank of the world. replica_compared_with_itself: `here` takes its own for that of the others.
[[nodiscard]] std::vector<CopyDivergence> compare_replicas(const std::vector<std::vector<GroupHash>>& by_rank, int here,
                                                           const PitfallSet& pitfalls = {});

/// Name and hash of each tensor of a group, one list for each rank of it (others' are empty): the first one that is not the same.
[[nodiscard]] std::string first_difference(const CopyDivergence& divergence,
                                           const std::vector<std::vector<std::pair<std::string, std::uint64_t>>>& by_rank);

/// "rank 2", "rank 0 or 1".
[[nodiscard]] std::string name_ranks(const std::vector<int>& ranks);

}  // namespace tandem

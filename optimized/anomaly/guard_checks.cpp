// SPDX-License-Identifier: Apache-2.0
// Looks at the whole state between steps: is it finite, in its range, and the same on all ranks that hold copies?
#include <map>
#include <utility>

#include <fmt/format.h>
#include <cereal/types/utility.hpp>

#include "core/io/binary.h"
#include "optimized/anomaly/guard_state.h"
#include "optimized/comm/exchange.h"

namespace tandem {
namespace {

// What a rank says of its state.
struct OwnState {
  std::string not_finite;  // first tensor that is not; empty: none
  bool only_here = false;  // and some of it is on no other rank
  std::string out_of_range;
  double value = 0, limit = 0;
  std::vector<GroupHash> hashes;
};
template <class Archive>
void serialize(Archive& archive, OwnState& state) {
  archive(state.not_finite, state.only_here, state.out_of_range, state.value, state.limit, state.hashes);
}

using NamedHashes = std::vector<std::pair<std::string, std::uint64_t>>;

bool has_copies(const LocalParameter& parameter, const ProcessGroups& groups) {
  if (parameter.expert()) return groups.size(GroupAxis::expert_gradient) > 1;
  if (parameter.tied_copy || groups.size(GroupAxis::gradient) > 1) return true;
  return parameter.shard.is_whole() && groups.size(GroupAxis::tensor) > 1;
}

}  // namespace

std::string AnomalyGuard::State::own_state() {
  const ParameterStore& store = engine_.store();
  const ProcessGroups& groups = engine_.groups();
  OwnState own;
  std::map<std::uint64_t, std::uint64_t> hashes;
  for (const StatePiece& piece : state_pieces(store)) {
    const LocalParameter& parameter = store.parameters()[piece.parameter];
    const HostView values(store.memory(), piece.values, Access::read);
    TensorLook seen;
    if (piece.whole && has_copies(parameter, groups)) {
      std::uint64_t& hash = hashes[replica_group(parameter, groups.grid(), groups.rank())];
      seen = look_at(values.view(), hash);
      hash = seen.hash;
    } else {
      seen = range_of(values.view());
    }
    bytes_ += piece.values.size_bytes();
    if (!seen.finite) {
      if (own.not_finite.empty()) own.not_finite = piece.name;
      own.only_here = own.only_here || !piece.whole;
    } else if (piece.is_weight) {
      const auto excess = weights_.see(piece.name, seen.largest);
      if (!excess || !own.out_of_range.empty()) continue;
      own.out_of_range = excess->tensor;
      own.value = excess->value;
      own.limit = excess->limit;
    }
  }
  weights_.end_look();
  for (const auto& [group, hash] : hashes) own.hashes.push_back({group, hash});
  return to_bytes(own);
}

AnomalyGuard::State::Findings AnomalyGuard::State::look_at_state() {
  Findings findings;
  append_state_findings(all_gather_bytes(world_, own_state()), findings);
  for (AnomalyFinding& finding : findings) finding.step = step_;
  return findings;
}

bool AnomalyGuard::State::vouches_for_state() {
  if (vouches_) return true;
  WeightRanges before = weights_;
  vouches_ = look_at_state().empty();
  if (!vouches_) weights_ = std::move(before);  // the next look finds it too
  return vouches_;
}

void AnomalyGuard::State::append_state_findings(const std::vector<std::string>& said, Findings& findings) {
  std::vector<std::vector<GroupHash>> hashes;
  AnomalyFinding not_finite, out_of_range;
  not_finite.monitor = AnomalyMonitor::weight_not_finite;
  out_of_range.monitor = AnomalyMonitor::weight_range;
  bool only_there = false;
  for (int rank = 0; rank < world_.size(); ++rank) {
    auto state = from_bytes<OwnState>(said[static_cast<std::size_t>(rank)]);
    // What ZeRO's owner of a part has spoilt, all have after the next update: its moments tell who it was.
    if (!state.not_finite.empty() && (not_finite.rank < 0 || (state.only_here && !only_there))) {
      only_there = state.only_here;
      not_finite.rank = rank;
      not_finite.where = state.not_finite;
    }
    if (out_of_range.rank < 0 && !state.out_of_range.empty()) {
      out_of_range.rank = rank;
      out_of_range.where = state.out_of_range;
      out_of_range.value = state.value;
      out_of_range.limit = state.limit;
    }
    hashes.push_back(std::move(state.hashes));
  }
  if (not_finite.rank >= 0) findings.push_back(std::move(not_finite));
  if (out_of_range.rank >= 0) findings.push_back(std::move(out_of_range));
  const std::vector<CopyDivergence> divergences = compare_replicas(hashes, world_.rank(), options_.pitfalls);
  // One finding: where all of a state differs, a second group tells no more.
  if (!divergences.empty()) name_divergence(divergences.front(), findings);
}

// A second round, of the tensors of the group alone: which one differs.
void AnomalyGuard::State::name_divergence(const CopyDivergence& divergence, Findings& findings) {
  const ParameterStore& store = engine_.store();
  const ProcessGroups& groups = engine_.groups();
  NamedHashes own;
  for (const StatePiece& piece : state_pieces(store)) {
    const LocalParameter& parameter = store.parameters()[piece.parameter];
    if (!piece.whole || replica_group(parameter, groups.grid(), groups.rank()) != divergence.group) continue;
    const HostView values(store.memory(), piece.values, Access::read);
    own.emplace_back(piece.name, look_at(values.view()).hash);
    bytes_ += piece.values.size_bytes();
  }
  std::vector<NamedHashes> all;
  for (const std::string& bytes : all_gather_bytes(world_, to_bytes(own))) all.push_back(from_bytes<NamedHashes>(bytes));
  AnomalyFinding finding;
  finding.monitor = AnomalyMonitor::replica_divergence;
  finding.where = first_difference(divergence, all);
  finding.value = static_cast<double>(divergence.odd.size());
  if (divergence.is_named()) {
    finding.rank = divergence.odd.front();
  } else {
    finding.where += ": " + name_ranks(divergence.ranks);
  }
  findings.push_back(std::move(finding));
}

}  // namespace tandem

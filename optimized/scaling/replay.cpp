// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/replay.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/engine/lower.h"
#include "optimized/scaling/replay_engine.h"

namespace tandem {
namespace {

int representative(const ProcessGrid& grid, int stage) { return grid.rank_of({.pipeline = stage}); }

CollectiveKind kind_of(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return CollectiveKind::all_reduce;
    case Collective::reduce_scatter: return CollectiveKind::reduce_scatter;
    case Collective::all_gather: return CollectiveKind::all_gather;
    case Collective::all_to_all: return CollectiveKind::all_to_all;
    case Collective::broadcast: return CollectiveKind::broadcast;
    default: break;
  }
  throw ContractError(fmt::format("{} is a message, not a collective", name(collective)));
}

double message_seconds(const LinkProfile& link, int from, int to, std::int64_t bytes) {
  const LinkLevel level = link.level(from, to);
  const double moving = level.bytes_per_second > 0 ? static_cast<double>(bytes) / level.bytes_per_second : 0;
  return level.latency_seconds + moving;
}

// The link as the members of a group see it: nodes with as many of them as the fullest has.
LinkProfile seen_by(const LinkProfile& link, const std::vector<int>& members) {
  std::map<int, int> in_node;
  for (const int member : members) ++in_node[member / link.ranks_per_node];
  LinkProfile seen = link;
  seen.ranks_per_node = 1;
  for (const auto& [node, count] : in_node) seen.ranks_per_node = std::max(seen.ranks_per_node, count);
  return seen;
}

class MeasuredCost {
 public:
  MeasuredCost(const WorldSettings& world, const TrainingPlan& plan, std::function<double(const Operation&)> compute_seconds)
      : link_(world.link), algorithm_(world.algorithm), grid_(plan), compute_seconds_(std::move(compute_seconds)) {}

  double operator()(const Operation& op, int stage) {
    if (op.kind != OpKind::communicate) return compute_seconds_(op);
    if (!link_ || op.collective == Collective::send) return 0;
    const int here = representative(grid_, stage);
    if (op.collective == Collective::recv) return message_seconds(*link_, op.peer, here, op.bytes);
    const Members& group = members_of(op.axis, stage);
    if (op.collective != Collective::ring_shift) {
      return expected_seconds(algorithm_, kind_of(op.collective), op.bytes, static_cast<int>(group.ranks.size()), group.link);
    }
    double slowest = 0;
    for (std::size_t i = 0; i < group.ranks.size(); ++i) {
      const int next = group.ranks[(i + 1) % group.ranks.size()];
      slowest = std::max(slowest, message_seconds(*link_, group.ranks[i], next, op.bytes));
    }
    return slowest;
  }

 private:
  struct Members {
    std::vector<int> ranks;
    LinkProfile link;
  };
  const Members& members_of(GroupAxis axis, int stage) {
    const auto [known, fresh] = groups_.try_emplace({axis, stage});
    if (fresh) {
      known->second.ranks = grid_.group(axis, representative(grid_, stage));
      known->second.link = seen_by(*link_, known->second.ranks);
    }
    return known->second;
  }

  std::optional<LinkProfile> link_;
  CollectiveAlgorithm algorithm_;
  ProcessGrid grid_;
  std::function<double(const Operation&)> compute_seconds_;
  std::map<std::pair<GroupAxis, int>, Members> groups_;
};

}  // namespace

std::vector<StepProgram> representative_programs(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence) {
  const ProcessGrid grid(plan);
  std::vector<StepProgram> programs;
  programs.reserve(static_cast<std::size_t>(plan.parallel.pipeline));
  for (int stage = 0; stage < plan.parallel.pipeline; ++stage) {
    programs.push_back(lower(plan, model, sequence, representative(grid, stage)));
  }
  return programs;
}

ReplayTiming replay(const std::vector<StepProgram>& representatives, const TrainingPlan& plan, const OperationCost& cost,
                    const SharesLinks& shares_links, const PitfallSet& pitfalls) {
  return ReplayEngine(representatives, plan, cost, shares_links, pitfalls).run();
}

ReplayTiming replay(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, const OperationCost& cost,
                    const SharesLinks& shares_links, const PitfallSet& pitfalls) {
  TrainingPlan played = plan;
  if (pitfalls.on(Pitfall::bubble_not_scaled_by_chunks)) played.pipeline = {};
  return replay(representative_programs(played, model, sequence), played, cost, shares_links, pitfalls);
}

OperationCost cost_measured(const WorldSettings& world, const TrainingPlan& plan,
                            const std::function<double(const Operation&)>& compute_seconds) {
  return MeasuredCost(world, plan, compute_seconds);
}

}  // namespace tandem

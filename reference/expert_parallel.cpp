// SPDX-License-Identifier: Apache-2.0
#include "reference/expert_parallel.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

/// What one rank sends another: for each expert of the one that owns them, rows [any, hidden].
template <class Real>
using Message = std::vector<std::vector<Real>>;

/// Messages [from][to] as they arrive: [to][from].
template <class Real>
std::vector<std::vector<Message<Real>>> all_to_all(const std::vector<std::vector<Message<Real>>>& sent) {
  std::vector<std::vector<Message<Real>>> arrived(sent.size());
  for (std::size_t to = 0; to < sent.size(); ++to) {
    for (const std::vector<Message<Real>>& from : sent) arrived[to].push_back(from[to]);
  }
  return arrived;
}

/// rows_of_ranks[r][e], rows that rank r has for expert e, to the owners: [owner][from][own expert].
template <class Real>
std::vector<std::vector<Message<Real>>> send_to_owners(const ExpertLayer& layer,
                                                       const std::vector<OfExperts<Real>>& rows_of_ranks) {
  const int ranks = static_cast<int>(rows_of_ranks.size());
  std::vector<std::vector<Message<Real>>> sent;
  for (const OfExperts<Real>& rows : rows_of_ranks) {
    std::vector<Message<Real>> messages;
    for (int to = 0; to < ranks; ++to) {
      const Interval own = own_experts(layer.experts, ranks, to);
      messages.emplace_back(rows.begin() + own.begin, rows.begin() + own.end);
    }
    sent.push_back(std::move(messages));
  }
  return all_to_all(sent);
}

/// The way back: results [owner][own expert], rows in the order in which they arrived, to [rank][expert]. `arrived` says how many
/// rows came from whom.
template <class Real>
std::vector<OfExperts<Real>> send_back(const std::vector<std::vector<Message<Real>>>& arrived,
                                       const std::vector<OfExperts<Real>>& results) {
  std::vector<std::vector<Message<Real>>> sent;
  for (std::size_t owner = 0; owner < arrived.size(); ++owner) {
    std::vector<Message<Real>> messages;
    std::vector<std::ptrdiff_t> next(results[owner].size(), 0);
    for (const Message<Real>& from : arrived[owner]) {
      Message<Real> message;
      for (std::size_t expert = 0; expert < from.size(); ++expert) {
        const auto begin = results[owner][expert].begin() + next[expert];
        const auto count = static_cast<std::ptrdiff_t>(from[expert].size());
        message.emplace_back(begin, begin + count);
        next[expert] += count;
      }
      messages.push_back(std::move(message));
    }
    sent.push_back(std::move(messages));
  }
  std::vector<OfExperts<Real>> returned;
  for (const std::vector<Message<Real>>& of_owners : all_to_all(sent)) {
    OfExperts<Real>& rows = returned.emplace_back();
    for (const Message<Real>& message : of_owners) rows.insert(rows.end(), message.begin(), message.end());
  }
  return returned;
}

/// Rows for own expert `expert` from rank 0, then from rank 1, ...
template <class Real>
std::vector<Real> rows_for(const std::vector<Message<Real>>& arrived, std::size_t expert) {
  std::vector<Real> rows;
  for (const Message<Real>& from : arrived) rows.insert(rows.end(), from[expert].begin(), from[expert].end());
  return rows;
}

std::string own_expert_name(const ExpertLayer& layer, const std::string& name, std::size_t ranks, std::size_t rank,
                            std::size_t expert) {
  const Interval own = own_experts(layer.experts, static_cast<int>(ranks), static_cast<int>(rank));
  return expert_name(name, static_cast<int>(own.begin) + static_cast<int>(expert));
}

}  // namespace

Interval own_experts(int experts, int ranks, int rank) {
  TANDEM_CHECK(ranks > 0 && experts % ranks == 0, fmt::format("{} experts cannot be dealt evenly to {} ranks", experts, ranks));
  return balanced_part(experts, ranks, rank);
}

template <class Real>
PerRank<Real> expert_parallel_forward(const ExpertLayer& layer, const std::string& name,
                                      std::span<const LockstepRank<Real>> group, const PerRank<Real>& x,
                                      std::vector<ExpertRankActivations<Real>>& kept) {
  kept.assign(group.size(), {});
  std::vector<OfExperts<Real>> dispatched(group.size());
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    kept[rank].x = x[rank];
    kept[rank].routing = route<Real>(layer, x[rank], tensor(group[rank].parameters, name + ".router.weight"));
    for (const std::vector<Assignment>& taken : kept[rank].routing.taken) {
      dispatched[rank].push_back(gather_assigned<Real>(x[rank], layer.hidden, taken));
    }
  }
  const auto arrived = send_to_owners(layer, dispatched);

  std::vector<OfExperts<Real>> results(group.size());
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    for (std::size_t expert = 0; expert < static_cast<std::size_t>(layer.experts) / group.size(); ++expert) {
      kept[rank].own.push_back(expert_forward<Real>(layer, group[rank].parameters,
                                                    own_expert_name(layer, name, group.size(), rank, expert),
                                                    rows_for(arrived[rank], expert)));
      results[rank].push_back(kept[rank].own.back().y);
    }
  }
  std::vector<OfExperts<Real>> returned = send_back(arrived, results);

  PerRank<Real> out;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    kept[rank].returned = std::move(returned[rank]);
    out.push_back(combine<Real>(layer, kept[rank].routing, kept[rank].returned));
  }
  return out;
}

template <class Real>
PerRank<Real> expert_parallel_backward(const ExpertLayer& layer, const std::string& name, std::span<LockstepRank<Real>> group,
                                       const std::vector<ExpertRankActivations<Real>>& kept, const PerRank<Real>& dout) {
  PerRank<Real> dgates;
  std::vector<OfExperts<Real>> dy;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    CombineGradients<Real> combined = combine_backward<Real>(layer, kept[rank].routing, kept[rank].returned, dout[rank]);
    dgates.push_back(std::move(combined.dgates));
    dy.push_back(std::move(combined.dy));
  }
  const auto arrived = send_to_owners(layer, dy);

  std::vector<OfExperts<Real>> results(group.size());
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    for (std::size_t expert = 0; expert < kept[rank].own.size(); ++expert) {
      results[rank].push_back(
          expert_backward<Real>(layer, group[rank].parameters, own_expert_name(layer, name, group.size(), rank, expert),
                                kept[rank].own[expert], rows_for(arrived[rank], expert), group[rank].gradients));
    }
  }
  const std::vector<OfExperts<Real>> dx_of_experts = send_back(arrived, results);

  PerRank<Real> dx;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    const RouterGradients<Real> router =
        route_backward<Real>(layer, kept[rank].x, tensor(std::as_const(group[rank].parameters), name + ".router.weight"),
                             kept[rank].routing, dgates[rank], tensor(group[rank].gradients, name + ".router.weight"));
    dx.push_back(add_gradients_of_experts<Real>(layer, kept[rank].routing, dx_of_experts[rank], router.dx));
  }
  return dx;
}

template PerRank<float> expert_parallel_forward(const ExpertLayer&, const std::string&, std::span<const LockstepRank<float>>,
                                                const PerRank<float>&, std::vector<ExpertRankActivations<float>>&);
template PerRank<double> expert_parallel_forward(const ExpertLayer&, const std::string&, std::span<const LockstepRank<double>>,
                                                 const PerRank<double>&, std::vector<ExpertRankActivations<double>>&);
template PerRank<float> expert_parallel_backward(const ExpertLayer&, const std::string&, std::span<LockstepRank<float>>,
                                                 const std::vector<ExpertRankActivations<float>>&, const PerRank<float>&);
template PerRank<double> expert_parallel_backward(const ExpertLayer&, const std::string&, std::span<LockstepRank<double>>,
                                                  const std::vector<ExpertRankActivations<double>>&, const PerRank<double>&);

}  // namespace tandem::reference

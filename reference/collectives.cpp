// SPDX-License-Identifier: Apache-2.0
#include "reference/collectives.h"

#include <cstddef>
#include <span>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

double message_seconds(double bytes, const AlphaBeta& link) { return link.latency_seconds + bytes / link.bytes_per_second; }

// log2(n) of a power of two.
int exact_log2(int ranks) {
  int log2 = 0;
  while ((1 << log2) < ranks) ++log2;
  TANDEM_CHECK((1 << log2) == ranks, fmt::format("{} ranks are no power of two", ranks));
  return log2;
}

template <class Real>
PerRank<Real> on_every_rank(const std::vector<Real>& values, std::size_t ranks) {
  return PerRank<Real>(ranks, values);
}

}  // namespace

template <class Real>
PerRank<Real> all_reduce(const PerRank<Real>& inputs) {
  std::vector<Real> sum = inputs.at(0);
  for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
    require_size(std::span(inputs[rank]), static_cast<std::int64_t>(sum.size()), "a rank's input");
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + inputs[rank][i];
  }
  return on_every_rank(sum, inputs.size());
}

template <class Real>
PerRank<Real> reduce_scatter(const PerRank<Real>& inputs, const std::vector<std::int64_t>& counts) {
  const std::vector<Real> sum = all_reduce(inputs)[0];
  TANDEM_CHECK(counts.size() == inputs.size(), fmt::format("{} counts for {} ranks", counts.size(), inputs.size()));
  PerRank<Real> outputs;
  auto next = sum.begin();
  for (const std::int64_t count : counts) {
    TANDEM_CHECK(count <= sum.end() - next, "the counts are more than the elements");
    outputs.emplace_back(next, next + count);
    next += count;
  }
  TANDEM_CHECK(next == sum.end(), "the counts are fewer than the elements");
  return outputs;
}

template <class Real>
PerRank<Real> all_gather(const PerRank<Real>& inputs) {
  std::vector<Real> joined;
  for (const std::vector<Real>& input : inputs) joined.insert(joined.end(), input.begin(), input.end());
  return on_every_rank(joined, inputs.size());
}

template <class Real>
PerRank<Real> all_to_all(const PerRank<Real>& inputs, const std::vector<std::vector<std::int64_t>>& counts) {
  PerRank<Real> outputs(inputs.size());
  for (std::size_t sender = 0; sender < inputs.size(); ++sender) {
    auto next = inputs[sender].begin();
    for (std::size_t receiver = 0; receiver < inputs.size(); ++receiver) {
      const std::int64_t count = counts.at(sender).at(receiver);
      TANDEM_CHECK(count <= inputs[sender].end() - next, "the counts are more than the elements");
      outputs[receiver].insert(outputs[receiver].end(), next, next + count);
      next += count;
    }
    TANDEM_CHECK(next == inputs[sender].end(), "the counts are fewer than the elements");
  }
  return outputs;
}

template <class Real>
PerRank<Real> broadcast(const PerRank<Real>& inputs, int root) {
  return on_every_rank(inputs.at(static_cast<std::size_t>(root)), inputs.size());
}

double direct_parts_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return link.latency_seconds + (ranks - 1) * (bytes / ranks) / link.bytes_per_second;
}

double direct_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return 2 * direct_parts_seconds(ranks, bytes, link);
}

double ring_parts_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return (ranks - 1) * message_seconds(bytes / ranks, link);
}

double ring_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return 2 * (ranks - 1) * message_seconds(bytes / ranks, link);
}

double recursive_parts_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return exact_log2(ranks) * link.latency_seconds + (ranks - 1) * (bytes / ranks) / link.bytes_per_second;
}

double recursive_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return 2 * recursive_parts_seconds(ranks, bytes, link);
}

double tree_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return 2 * tree_broadcast_seconds(ranks, bytes, link);
}

double naive_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return 2 * (link.latency_seconds + (ranks - 1) * bytes / link.bytes_per_second);
}

double recursive_all_reduce_seconds_of_any(int ranks, double bytes, const AlphaBeta& link) {
  int power = 1;
  while (2 * power <= ranks) power *= 2;
  const double of_pairs = power == ranks ? 0 : 2 * message_seconds(bytes, link);
  return of_pairs + recursive_all_reduce_seconds(power, bytes, link);
}

double direct_broadcast_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return link.latency_seconds + (ranks - 1) * bytes / link.bytes_per_second;
}

double tree_broadcast_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return exact_log2(ranks) * message_seconds(bytes, link);
}

double ring_broadcast_seconds(int ranks, double bytes, const AlphaBeta& link) {
  return direct_parts_seconds(ranks, bytes, link) + ring_parts_seconds(ranks, bytes, link);
}

double hierarchical_parts_seconds(double bytes, const TwoLevels& link) {
  const double of_place = bytes / link.ranks_per_node;
  const double in_node = (link.ranks_per_node - 1) * message_seconds(of_place, link.near);
  return in_node + (link.nodes - 1) * message_seconds(of_place / link.nodes, link.far);
}

double hierarchical_all_reduce_seconds(double bytes, const TwoLevels& link) {
  return 2 * hierarchical_parts_seconds(bytes, link);
}

double least_all_reduce_bytes(int ranks, double bytes) { return 2 * bytes * (ranks - 1) / ranks; }

double algorithm_bandwidth(double bytes, double seconds) { return bytes / seconds; }

double all_reduce_bus_factor(int ranks) { return 2.0 * (ranks - 1) / ranks; }

double parts_bus_factor(int ranks) { return static_cast<double>(ranks - 1) / ranks; }

template PerRank<float> all_reduce(const PerRank<float>&);
template PerRank<double> all_reduce(const PerRank<double>&);
template PerRank<std::int32_t> all_reduce(const PerRank<std::int32_t>&);
template PerRank<std::int64_t> all_reduce(const PerRank<std::int64_t>&);
template PerRank<float> reduce_scatter(const PerRank<float>&, const std::vector<std::int64_t>&);
template PerRank<double> reduce_scatter(const PerRank<double>&, const std::vector<std::int64_t>&);
template PerRank<std::int32_t> reduce_scatter(const PerRank<std::int32_t>&, const std::vector<std::int64_t>&);
template PerRank<std::int64_t> reduce_scatter(const PerRank<std::int64_t>&, const std::vector<std::int64_t>&);
template PerRank<float> all_gather(const PerRank<float>&);
template PerRank<double> all_gather(const PerRank<double>&);
template PerRank<std::int32_t> all_gather(const PerRank<std::int32_t>&);
template PerRank<std::int64_t> all_gather(const PerRank<std::int64_t>&);
template PerRank<float> all_to_all(const PerRank<float>&, const std::vector<std::vector<std::int64_t>>&);
template PerRank<double> all_to_all(const PerRank<double>&, const std::vector<std::vector<std::int64_t>>&);
template PerRank<std::int32_t> all_to_all(const PerRank<std::int32_t>&, const std::vector<std::vector<std::int64_t>>&);
template PerRank<std::int64_t> all_to_all(const PerRank<std::int64_t>&, const std::vector<std::vector<std::int64_t>>&);
template PerRank<float> broadcast(const PerRank<float>&, int);
template PerRank<double> broadcast(const PerRank<double>&, int);
template PerRank<std::int32_t> broadcast(const PerRank<std::int32_t>&, int);
template PerRank<std::int64_t> broadcast(const PerRank<std::int64_t>&, int);

}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "reference/lockstep.h"

/// What collectives mean, on ranks in lockstep, and what they cost in the alpha-beta model.
namespace tandem::reference {

/// Every rank: inputs[0] + inputs[1] + ..., added in that order. All of one length.
template <class Real>
[[nodiscard]] PerRank<Real> all_reduce(const PerRank<Real>& inputs);

/// Rank r: its part of that sum, counts[r] elements after those of the ranks before it.
template <class Real>
[[nodiscard]] PerRank<Real> reduce_scatter(const PerRank<Real>& inputs, const std::vector<std::int64_t>& counts);

/// Every rank: inputs[0], then inputs[1], ...
template <class Real>
[[nodiscard]] PerRank<Real> all_gather(const PerRank<Real>& inputs);

/// Rank r: what each rank has for r, in order of ranks. inputs[s] is, in order of receivers r, counts[s][r] elements for each.
template <class Real>
[[nodiscard]] PerRank<Real> all_to_all(const PerRank<Real>& inputs, const std::vector<std::vector<std::int64_t>>& counts);

/// Every rank: inputs[root].
template <class Real>
[[nodiscard]] PerRank<Real> broadcast(const PerRank<Real>& inputs, int root);

/// A message of b bytes takes a + b/B (a: latency, B: bandwidth); messages that a rank sends or receives back to back follow each
/// other b/B apart; a rank sends and receives at the same time.
struct AlphaBeta {
  double latency_seconds = 0;
  double bytes_per_second = 0;
};

/// Seconds of n ranks. b: bytes of the whole tensor (the input of a reduce-scatter, the output of an all-gather, what one rank
/// sends and keeps in an all-to-all), split evenly.
///
/// direct      parts to everybody at once:     reduce-scatter, all-gather, all-to-all   a + (n-1)/n b/B;   all-reduce twice that
/// ring        n-1 steps of b/n:               reduce-scatter, all-gather   (n-1) (a + b/(n B));   all-reduce twice that
/// recursive   n a power of two, halves of halves:   reduce-scatter, all-gather   log2(n) a + (n-1)/n b/B;   all-reduce twice
/// that tree        n a power of two:               broadcast   log2(n) (a + b/B);   all-reduce twice that naive       everybody
/// sends everything to rank 0, which adds it up in order of ranks and sends the sum to everybody, one port
///             for all:                        all-reduce   2 (a + (n-1) b/B)
[[nodiscard]] double direct_parts_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double direct_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double ring_parts_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double ring_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double recursive_parts_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double recursive_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double tree_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double naive_all_reduce_seconds(int ranks, double bytes, const AlphaBeta& link);

/// Recursive halving of n = 2^q + k ranks with k > 0: k pairs meet first and part last, b both times; 2^q ranks do the rest.
[[nodiscard]] double recursive_all_reduce_seconds_of_any(int ranks, double bytes, const AlphaBeta& link);

/// direct: from the root to everybody, a + (n-1) b/B. tree: log2(n) (a + b/B), n a power of two. ring: parts dealt out and passed
/// around, a + (n-1)/n b/B + (n-1) (a + b/(n B)).
[[nodiscard]] double direct_broadcast_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double tree_broadcast_seconds(int ranks, double bytes, const AlphaBeta& link);
[[nodiscard]] double ring_broadcast_seconds(int ranks, double bytes, const AlphaBeta& link);

/// N nodes of m ranks, a ring in each node on b, then m rings between nodes on b/m each:
///   reduce-scatter, all-gather   (m-1) (a_near + b/(m B_near)) + (N-1) (a_far + b/(m N B_far));   all-reduce twice that
struct TwoLevels {
  int nodes = 1;
  int ranks_per_node = 1;
  AlphaBeta near, far;  ///< in a node, between nodes
};
[[nodiscard]] double hierarchical_parts_seconds(double bytes, const TwoLevels& link);
[[nodiscard]] double hierarchical_all_reduce_seconds(double bytes, const TwoLevels& link);

/// Bytes that one rank sends in an all-reduce that sends no more than it must: 2 b (n-1)/n. Reduce-scatter, all-gather and
/// all-to-all: half of it.
[[nodiscard]] double least_all_reduce_bytes(int ranks, double bytes);

/// nccl-tests' rates. Algorithm bandwidth b/t, b as above. Bus bandwidth: times the factor that makes it comparable with the
/// link's bandwidth whatever n is: 2 (n-1)/n for all-reduce, (n-1)/n for reduce-scatter, all-gather and all-to-all, 1 for
/// broadcast.
[[nodiscard]] double algorithm_bandwidth(double bytes, double seconds);
[[nodiscard]] double all_reduce_bus_factor(int ranks);
[[nodiscard]] double parts_bus_factor(int ranks);
inline constexpr double kBroadcastBusFactor = 1;

}  // namespace tandem::reference

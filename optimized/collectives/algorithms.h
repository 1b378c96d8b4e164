// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/world_settings.h"
#include "optimized/collectives/peers.h"

namespace tandem {

/// Collectives over messages. All members call the same function with the same arguments but for addresses; every function blocks
/// and throws what Peers::wait() throws, ContractError where counts are not those of the buffers. Sums are formed in `dtype`
/// (16-bit floats in fp32, rounded once per partial sum that travels; `direct` once). Every algorithm gives the same bits on
/// every rank and in every run. `automatic` is resolved by the caller (choose_algorithm). An algorithm that does not exist for an
/// operation stands for `direct`; supports() tells. Parts are `counts[r]` elements of rank r, in order of ranks; no part needs to
/// have any. Any alignment.
///
/// all_reduce over n ranks of b bytes: messages one after the other in time, and bytes that a rank sends:
///   direct        exchange of parts, sum in rank order, exchange of sums   2,             2 b (n-1)/n
///   ring          reduce-scatter then all-gather around the ring           2 (n-1),       2 b (n-1)/n
///   recursive     halving, then doubling of distances                      2 log2 n,      2 b (n-1)/n
///                 n = p + k, p the largest power of two: ranks 0 and 1, ..., 2k-2 and 2k-1 meet, and the even one takes part for
///                 both                                                     2 log2 p + 2,  2 b (p-1)/p, even + b, odd b
///   tree          binomial tree to rank 0 and back                         2 ceil(log2 n), b to the parent and to each child
///   hierarchical  N nodes of m: reduce-scatter in the node, all_reduce between the ranks of equal place, all-gather in the node,
///                 each a ring                                              2 (m-1) + 2 (N-1), 2 b (m-1)/m + 2 (b/m) (N-1)/N
///                 nodes of unequal size: tree to the first of each node, ring between these, tree back
void all_reduce(Peers& peers, CollectiveAlgorithm algorithm, DType dtype, std::span<std::byte> data);
/// output may lie at its place in input.
void reduce_scatter(Peers& peers, CollectiveAlgorithm algorithm, DType dtype, std::span<const std::byte> input,
                    std::span<std::byte> output, std::span<const std::int64_t> counts);
/// input may lie at its place in output.
void all_gather(Peers& peers, CollectiveAlgorithm algorithm, DType dtype, std::span<const std::byte> input,
                std::span<std::byte> output, std::span<const std::int64_t> counts);
/// send_counts[r] elements go to rank r, receive_counts[r] come from it.
void all_to_all(Peers& peers, CollectiveAlgorithm algorithm, DType dtype, std::span<const std::byte> input,
                std::span<const std::int64_t> send_counts, std::span<std::byte> output,
                std::span<const std::int64_t> receive_counts);
/// direct: from the root to everybody. tree: binomial. ring: the root deals parts out, which then go around. hierarchical: tree
/// between one rank of each node, then tree in the node.
void broadcast(Peers& peers, CollectiveAlgorithm algorithm, std::span<std::byte> data, int root);
/// Nobody leaves before all have come (dissemination).
void barrier(Peers& peers);

enum class CollectiveKind : std::uint8_t { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast };
[[nodiscard]] bool supports(CollectiveAlgorithm algorithm, CollectiveKind kind) noexcept;

/// Seconds that the alpha-beta model of the link expects, ranks 0, 1, ... of the profile taking part with equal parts, broadcast
/// from rank 0; `bytes` of the whole tensor (all_reduce, broadcast: data; reduce_scatter: input; all_gather: output; all_to_all:
/// input of one rank). Formulas: choice.cpp. automatic: of the fastest.
[[nodiscard]] double expected_seconds(CollectiveAlgorithm algorithm, CollectiveKind kind, std::int64_t bytes, int ranks,
                                      const LinkProfile& link);
/// The fastest algorithm by expected_seconds() of those that support the kind; of equals the first.
[[nodiscard]] CollectiveAlgorithm choose_algorithm(CollectiveKind kind, std::int64_t bytes, int ranks, const LinkProfile& link);

}  // namespace tandem

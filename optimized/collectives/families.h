// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "optimized/collectives/members.h"
#include "optimized/collectives/parts.h"

/// The algorithms of algorithms.h, one family per file, over any subset of ranks: place p of the members owns part p. Scratch is
/// passed in. Buffers alias as in algorithms.h.
namespace tandem::collectives {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// direct.cpp: every place to every other, in turns, so that no port is asked by two at a time.
[[nodiscard]] std::int64_t direct_scratch_bytes(const Members& members, const Parts& parts);
void direct_reduce_scatter(const Members& members, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch);
void direct_all_gather(const Members& members, const Parts& parts, ConstBytes input, Bytes output);
void direct_all_to_all(const Members& members, const Parts& sent, ConstBytes input, const Parts& received, Bytes output);
void direct_broadcast(const Members& members, Bytes data, int root);
/// The root's output <- concatenation; other places' outputs are not touched.
void direct_gather(const Members& members, const Parts& parts, ConstBytes input, Bytes output, int root);
/// The inverse: part p of the root's input <- place p's output.
void direct_scatter(const Members& members, const Parts& parts, ConstBytes input, Bytes output, int root);

// ring.cpp: from each place to the next. reduce_scatter needs scratch of the size of the input.
void ring_reduce_scatter(const Members& members, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch);
void ring_all_gather(const Members& members, const Parts& parts, ConstBytes input, Bytes output);
/// Scratch of the size of the data.
void ring_all_reduce(const Members& members, DType dtype, Bytes data, Bytes scratch);
void ring_broadcast(const Members& members, Bytes data, int root);

// recursive.cpp. Scratch of the size of the data, for reduce_scatter twice the size of the input.
void recursive_all_reduce(const Members& members, DType dtype, Bytes data, Bytes scratch);
void recursive_reduce_scatter(const Members& members, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch);
void recursive_all_gather(const Members& members, const Parts& parts, ConstBytes input, Bytes output);

// tree.cpp. Scratch of the size of the data.
/// Place 0's data <- sum; what the others' data hold afterwards is not said.
void tree_reduce(const Members& members, DType dtype, Bytes data, Bytes scratch);
void tree_broadcast(const Members& members, Bytes data, int root);

// hierarchical.cpp. Scratch of the size of the whole tensor, for reduce_scatter twice that.
void hierarchical_all_reduce(Peers& peers, DType dtype, Bytes data, Bytes scratch);
void hierarchical_reduce_scatter(Peers& peers, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch);
void hierarchical_all_gather(Peers& peers, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch);
void hierarchical_broadcast(Peers& peers, Bytes data, int root);

}  // namespace tandem::collectives

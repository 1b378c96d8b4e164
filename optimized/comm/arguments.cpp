// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/arguments.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

using Counts = std::span<const std::int64_t>;

std::int64_t total(Counts counts, int ranks, std::string_view what) {
  TANDEM_CHECK(std::ssize(counts) == ranks, fmt::format("{} has {} entries for {} ranks", what, counts.size(), ranks));
  TANDEM_CHECK(std::ranges::all_of(counts, [](std::int64_t count) { return count >= 0; }), fmt::format("{} below 0", what));
  return std::reduce(counts.begin(), counts.end(), std::int64_t{0});
}

void require_elements(TensorView view, std::int64_t elements, std::string_view what) {
  TANDEM_CHECK(view.num_elements() == elements, fmt::format("{} has {} elements, not {}", what, view.num_elements(), elements));
}

void require_one_dtype(TensorView input, TensorView output) {
  TANDEM_CHECK(input.dtype() == output.dtype(), fmt::format("input is {}, output {}", name(input.dtype()), name(output.dtype())));
}

// `inner` may lie at `place` bytes into `outer`, and otherwise may not touch it.
void require_apart_or_in_place(TensorView inner, TensorView outer, std::int64_t place) {
  if (inner.size_bytes() == 0 || outer.size_bytes() == 0) return;
  const auto* const outer_begin = static_cast<const std::byte*>(outer.data());
  const auto* const inner_begin = static_cast<const std::byte*>(inner.data());
  const bool apart = inner_begin + inner.size_bytes() <= outer_begin || outer_begin + outer.size_bytes() <= inner_begin;
  TANDEM_CHECK(apart || (place >= 0 && inner_begin == outer_begin + place), "input and output overlap");
}

std::int64_t place_of(int rank, Counts counts, DType dtype) {
  return std::reduce(counts.begin(), counts.begin() + rank, std::int64_t{0}) * static_cast<std::int64_t>(size_bytes(dtype));
}

}  // namespace

void check_reduce_scatter(TensorView input, TensorView output, Counts counts, int rank, int ranks) {
  require_one_dtype(input, output);
  require_elements(input, total(counts, ranks, "counts"), "input");
  require_elements(output, counts[static_cast<std::size_t>(rank)], "output");
  require_apart_or_in_place(output, input, place_of(rank, counts, input.dtype()));
}

void check_all_gather(TensorView input, TensorView output, Counts counts, int rank, int ranks) {
  require_one_dtype(input, output);
  require_elements(output, total(counts, ranks, "counts"), "output");
  require_elements(input, counts[static_cast<std::size_t>(rank)], "input");
  require_apart_or_in_place(input, output, place_of(rank, counts, input.dtype()));
}

void check_all_to_all(TensorView input, Counts send_counts, TensorView output, Counts receive_counts, int ranks) {
  require_one_dtype(input, output);
  require_elements(input, total(send_counts, ranks, "send_counts"), "input");
  require_elements(output, total(receive_counts, ranks, "receive_counts"), "output");
  require_apart_or_in_place(input, output, -1);
}

void check_root(int root, int ranks) { TANDEM_CHECK(root >= 0 && root < ranks, fmt::format("root {} of {} ranks", root, ranks)); }

void check_peer(int peer, int ranks) { TANDEM_CHECK(peer >= 0 && peer < ranks, fmt::format("rank {} of {} ranks", peer, ranks)); }

}  // namespace tandem

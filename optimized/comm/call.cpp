// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/call.h"

#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/batch.h"

namespace tandem {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

bool agree(const Call& a, const Call& b) {
  if (a.kind != b.kind || a.options.algorithm != b.options.algorithm) return false;
  switch (a.kind) {
    case CallKind::all_reduce: return a.dtype == b.dtype && a.elements == b.elements;
    case CallKind::broadcast: return a.dtype == b.dtype && a.elements == b.elements && a.root == b.root;
    case CallKind::reduce_scatter:
    case CallKind::all_gather: return a.dtype == b.dtype && a.counts == b.counts;
    case CallKind::all_to_all: return a.dtype == b.dtype;
    case CallKind::barrier:
    case CallKind::split: return true;
  }
  return false;
}

// What `from` sends to `to`, against what `to` expects.
std::optional<std::string> find_count_mismatch(const Call& send, int from, const Call& receive, int to,
                                               std::span<const int> members) {
  const std::int64_t sent = send.counts[at(to)];
  const std::int64_t expected = receive.receive_counts[at(from)];
  if (sent == expected) return std::nullopt;
  return fmt::format("rank {} sends {} elements to rank {}, which expects {}: {}", members[at(from)], sent, members[at(to)],
                     expected, describe(send));
}

}  // namespace

std::string_view name(CallKind kind) {
  switch (kind) {
    case CallKind::all_reduce: return "all_reduce";
    case CallKind::reduce_scatter: return "reduce_scatter";
    case CallKind::all_gather: return "all_gather";
    case CallKind::all_to_all: return "all_to_all";
    case CallKind::broadcast: return "broadcast";
    case CallKind::barrier: return "barrier";
    case CallKind::split: return "split";
  }
  return "?";
}

CallBuffers buffers_of(const Call& call, int rank) {
  const auto bytes = [&](std::byte* begin, std::int64_t elements) {
    return std::span(begin, static_cast<std::size_t>(elements) * size_bytes(call.dtype));
  };
  const auto total = [](const std::vector<std::int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  };
  switch (call.kind) {
    case CallKind::all_reduce: return {bytes(call.input, call.elements), bytes(call.output, call.elements)};
    case CallKind::broadcast:
      if (rank == call.root) return {bytes(call.input, call.elements), {}};
      return {{}, bytes(call.output, call.elements)};
    case CallKind::reduce_scatter: return {bytes(call.input, total(call.counts)), bytes(call.output, call.counts[at(rank)])};
    case CallKind::all_gather: return {bytes(call.input, call.counts[at(rank)]), bytes(call.output, total(call.counts))};
    case CallKind::all_to_all: return {bytes(call.input, total(call.counts)), bytes(call.output, total(call.receive_counts))};
    case CallKind::barrier:
    case CallKind::split: break;
  }
  return {};
}

std::string describe(const Call& call) {
  std::string text(name(call.kind));
  if (call.options.algorithm) text = fmt::format("{} {}", name(*call.options.algorithm), text);
  if (!call.options.name.empty()) text += fmt::format(" '{}'", call.options.name);
  switch (call.kind) {
    case CallKind::all_reduce: return text + fmt::format(" of {} {}", call.elements, name(call.dtype));
    case CallKind::broadcast: return text + fmt::format(" of {} {} from {}", call.elements, name(call.dtype), call.root);
    case CallKind::reduce_scatter:
    case CallKind::all_gather:
    case CallKind::all_to_all: return text + fmt::format(" of [{}] {}", fmt::join(call.counts, ", "), name(call.dtype));
    case CallKind::barrier:
    case CallKind::split: break;
  }
  return text;
}

std::int64_t wire_bytes(const Call& call, int rank, int ranks) {
  const auto width = static_cast<std::int64_t>(size_bytes(call.dtype));
  const auto total = [&] { return std::accumulate(call.counts.begin(), call.counts.end(), std::int64_t{0}); };
  switch (call.kind) {
    case CallKind::all_reduce: {
      const std::int64_t own = balanced_part(call.elements, ranks, rank).size();
      return width * (call.elements - own + own * (ranks - 1));
    }
    case CallKind::reduce_scatter:
    case CallKind::all_to_all: return width * (total() - call.counts[at(rank)]);
    case CallKind::all_gather: return width * call.counts[at(rank)] * (ranks - 1);
    case CallKind::broadcast: return rank == call.root ? width * call.elements * (ranks - 1) : 0;
    case CallKind::barrier:
    case CallKind::split: return 0;
  }
  return 0;
}

std::optional<std::string> find_mismatch(const Call& call_a, int a, const Call& call_b, int b, std::span<const int> members) {
  if (!agree(call_a, call_b)) {
    return fmt::format("calls of the ranks do not match: rank {} calls {}, rank {} calls {}", members[at(a)], describe(call_a),
                       members[at(b)], describe(call_b));
  }
  if (call_a.kind != CallKind::all_to_all) return std::nullopt;
  if (auto mismatch = find_count_mismatch(call_a, a, call_b, b, members)) return mismatch;
  return find_count_mismatch(call_b, b, call_a, a, members);
}

std::optional<std::string> find_mismatch(std::span<const Call* const> calls, std::span<const int> members) {
  const int ranks = static_cast<int>(calls.size());
  for (int rank = 1; rank < ranks; ++rank) {
    if (auto mismatch = find_mismatch(*calls[0], 0, *calls[at(rank)], rank, members)) return mismatch;
  }
  if (calls[0]->kind != CallKind::all_to_all) return std::nullopt;
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (auto mismatch = find_count_mismatch(*calls[at(from)], from, *calls[at(to)], to, members)) return mismatch;
    }
  }
  return std::nullopt;
}

std::optional<std::string> find_mixed_memory(std::span<const Call* const> calls, std::span<const int> members) {
  int first = -1;
  for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
    const Call& call = *calls[at(rank)];
    const CallBuffers buffers = buffers_of(call, rank);
    if (buffers.read.empty() && buffers.written.empty()) continue;
    if (first < 0) first = rank;
    const std::string_view place = calls[at(first)]->device.place();
    if (call.device.place() == place) continue;
    return fmt::format("buffers of {} lie apart: those of rank {} in {}, those of rank {} in {}", describe(call),
                       members[at(first)], place, members[at(rank)], call.device.place());
  }
  return std::nullopt;
}

}  // namespace tandem

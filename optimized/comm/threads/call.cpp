// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/call.h"

#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/batch.h"

namespace tandem {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

bool agree(const Call& a, const Call& b) {
  if (a.kind != b.kind) return false;
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

std::optional<std::string> find_count_mismatch(std::span<const Call* const> calls, std::span<const int> members) {
  for (std::size_t from = 0; from < calls.size(); ++from) {
    for (std::size_t to = 0; to < calls.size(); ++to) {
      const std::int64_t sent = calls[from]->counts[to];
      const std::int64_t expected = calls[to]->receive_counts[from];
      if (sent != expected) {
        return fmt::format("rank {} sends {} elements to rank {}, which expects {}: {}", members[from], sent, members[to],
                           expected, describe(*calls[from]));
      }
    }
  }
  return std::nullopt;
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

std::string describe(const Call& call) {
  std::string text(name(call.kind));
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

std::optional<std::string> find_mismatch(std::span<const Call* const> calls, std::span<const int> members) {
  for (std::size_t rank = 1; rank < calls.size(); ++rank) {
    if (!agree(*calls[0], *calls[rank])) {
      return fmt::format("calls of the ranks do not match: rank {} calls {}, rank {} calls {}", members[0], describe(*calls[0]),
                         members[rank], describe(*calls[rank]));
    }
  }
  if (calls[0]->kind == CallKind::all_to_all) return find_count_mismatch(calls, members);
  return std::nullopt;
}

}  // namespace tandem

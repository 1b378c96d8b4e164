// SPDX-License-Identifier: Apache-2.0
// What an endpoint makes of operations that do not end: who is missing, and whether the calls match.
#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "optimized/comm/nccl/nccl_endpoint.h"
#include "optimized/comm/nccl/nccl_work.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// Where ranks are processes, asking them what they do costs messages: after 1/4, 1/2, 1, 2, 4 ... seconds is often enough.
bool is_time_to_compare(std::chrono::nanoseconds waited) {
  constexpr std::chrono::nanoseconds kInterval = 100ms;  // of looks
  for (std::chrono::nanoseconds when = 250ms; when <= waited; when *= 2) {
    if (waited < when + kInterval) return true;
  }
  return false;
}

}  // namespace

void NcclEndpoint::look(const NcclCollective& collective, std::chrono::nanoseconds waited) {
  WorldState& the_world = world();
  if (the_world.failed()) return;
  const bool is_late = waited >= the_world.deadline();
  if (!is_late && !the_world.any_ended() && !the_world.sees_all_flights() && !is_time_to_compare(waited)) return;
  const Flights flights = the_world.flights();
  if (const auto mismatch = find_disagreement(flights, collective.number())) return fail_contract(*mismatch);
  const std::vector<int> absent = missing(flights, collective.number());
  for (const int rank : absent) {
    if (rank == world_rank() || !the_world.ended(rank)) continue;
    the_world.fail({Failure::Kind::peer, rank,
                    fmt::format("rank {} has ended without joining rank {} in {}", rank, world_rank(), collective.what())});
    return;
  }
  if (is_late) time_out(collective.what(), absent, flights);
}

void NcclEndpoint::look(const NcclMessage& message, std::chrono::nanoseconds waited) {
  WorldState& the_world = world();
  if (the_world.failed()) return;
  const int peer = members_[at(message.call().peer)];
  if (the_world.ended(peer)) {
    the_world.fail({Failure::Kind::peer, peer,
                    fmt::format("rank {} has ended without joining rank {} in {}", peer, world_rank(), message.what())});
    return;
  }
  // A receive may be posted long before anybody waits for it.
  const std::chrono::nanoseconds of_rank = message.waited().value_or(message.call().sends() ? Clock::duration(waited) : 0ns);
  if (std::min<std::chrono::nanoseconds>(waited, of_rank) >= the_world.deadline())
    time_out(message.what(), {peer}, the_world.flights());
}

void NcclEndpoint::fail_contract(const std::string& text) { world().fail({Failure::Kind::contract, world_rank(), text}); }

// World ranks of the members that have not come to the collective, as far as is known.
std::vector<int> NcclEndpoint::missing(const Flights& flights, std::uint64_t number) const {
  std::vector<int> absent;
  for (const int member : members_) {
    const bool is_there = std::any_of(flights.begin(), flights.end(), [&](const RankFlights& of_rank) {
      return of_rank.rank == member && std::any_of(of_rank.groups.begin(), of_rank.groups.end(), [&](const GroupFlights& group) {
               return group.group == id_ && group.collectives_arrived >= number;
             });
    });
    if (!is_there && member != world_rank()) absent.push_back(member);
  }
  return absent;
}

std::optional<std::string> NcclEndpoint::find_disagreement(const Flights& flights, std::uint64_t number) const {
  std::vector<std::pair<int, const Call*>> calls;
  for (int rank = 0; rank < size(); ++rank) {
    const Flight* const flight = find_flight(flights, members_[at(rank)], id_, false, number);
    if (flight != nullptr) calls.emplace_back(rank, &flight->call);
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    for (std::size_t j = i + 1; j < calls.size(); ++j) {
      auto mismatch = find_mismatch(*calls[i].second, calls[i].first, *calls[j].second, calls[j].first, members_);
      if (mismatch) return mismatch;
    }
  }
  return std::nullopt;
}

void NcclEndpoint::time_out(const std::string& what, const std::vector<int>& ranks, const Flights& flights) {
  const std::string waited = fmt::format("rank {} waited {} ms in {}", world_rank(), world().deadline().count(), what);
  const std::string text = ranks.empty() ? waited + ", in which all ranks are"
                                         : fmt::format("{} for rank{} {}: {}", waited, ranks.size() == 1 ? "" : "s",
                                                       fmt::join(ranks, ", "), describe_last(flights, ranks, world().ranks()));
  world().fail({Failure::Kind::timeout, world_rank(), text});
}

}  // namespace tandem

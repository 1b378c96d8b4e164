// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/flight_recorder.h"

#include <time.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/timeline.h"

namespace tandem {
namespace {

double seconds_since(std::int64_t then_ns, std::int64_t now_ns) { return static_cast<double>(now_ns - then_ns) * 1e-9; }

// The time of the steady clock, some milliseconds old.
std::int64_t coarse_now_ns() noexcept {
#if defined(CLOCK_MONOTONIC_COARSE)
  timespec now{};
  if (clock_gettime(CLOCK_MONOTONIC_COARSE, &now) == 0) return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
#endif
  return Timeline::now_ns();
}

std::string describe(const GroupFlights& group, int world_ranks) {
  if (static_cast<int>(group.members.size()) == world_ranks) return "all ranks";
  return fmt::format("ranks {}", fmt::join(group.members, ", "));
}

const RankFlights* find_rank(const std::vector<RankFlights>& all, int rank) {
  const auto found = std::ranges::find(all, rank, &RankFlights::rank);
  return found == all.end() ? nullptr : &*found;
}

const GroupFlights* find_group(const RankFlights& flights, std::uint64_t group) {
  const auto found = std::ranges::find(flights.groups, group, &GroupFlights::group);
  return found == flights.groups.end() ? nullptr : &*found;
}

// A flight and where it belongs.
struct Place {
  const GroupFlights* group = nullptr;
  const Flight* flight = nullptr;
};

// The one that `better(a, b)` prefers to all others of those that `counts`; none: null.
template <class Counts, class Better>
Place find_best(const RankFlights& flights, const Counts& counts, const Better& better) {
  Place best;
  for (const GroupFlights& group : flights.groups) {
    for (const Flight& flight : group.flights) {
      if (counts(flight) && (best.flight == nullptr || better(flight, *best.flight))) best = {&group, &flight};
    }
  }
  return best;
}

// The clock is coarse; of equals the one further back in the list is the later one.
bool is_later(const Flight& a, const Flight& b) { return a.changed_seconds_ago <= b.changed_seconds_ago; }

bool is_posted_before(const Flight& a, const Flight& b) {
  return std::tuple(-a.posted_seconds_ago, a.is_message, a.number) < std::tuple(-b.posted_seconds_ago, b.is_message, b.number);
}

}  // namespace

std::string describe(const Flight& flight, const GroupFlights& group, int world_ranks) {
  if (flight.is_message) return describe(flight.message, group.members);
  return fmt::format("{} (no. {} of {})", describe(flight.call), flight.number, describe(group, world_ranks));
}

std::string describe_last(const RankFlights& flights, int world_ranks) {
  const Place done = find_best(
      flights, [](const Flight& flight) { return flight.state == FlightState::done; }, is_later);
  const Place now = find_best(
      flights, [](const Flight& flight) { return flight.state == FlightState::arrived; },
      [](const Flight& a, const Flight& b) { return a.changed_seconds_ago > b.changed_seconds_ago; });
  std::string text = fmt::format("rank {} ", flights.rank);
  text += done.flight == nullptr ? "has finished no operation"
                                 : fmt::format("finished {} {:.1f} s ago", describe(*done.flight, *done.group, world_ranks),
                                               done.flight->changed_seconds_ago);
  if (now.flight != nullptr) {
    return text + fmt::format(" and is in {} for {:.1f} s", describe(*now.flight, *now.group, world_ranks),
                              now.flight->changed_seconds_ago);
  }
  const Place posted = find_best(
      flights, [](const Flight& flight) { return flight.state == FlightState::posted; },
      [](const Flight& a, const Flight& b) { return a.posted_seconds_ago > b.posted_seconds_ago; });
  if (posted.flight == nullptr) return text + " and waits in none";
  return text + fmt::format(" and waits in none; it posted {} {:.1f} s ago", describe(*posted.flight, *posted.group, world_ranks),
                            posted.flight->posted_seconds_ago);
}

std::string describe_last(const std::vector<RankFlights>& all, const std::vector<int>& ranks, int world_ranks) {
  std::vector<std::string> texts;
  for (const int rank : ranks) {
    const RankFlights* const flights = find_rank(all, rank);
    texts.push_back(flights == nullptr ? fmt::format("rank {} does not tell what it did last", rank)
                                       : describe_last(*flights, world_ranks));
  }
  return fmt::format("{}", fmt::join(texts, "; "));
}

std::vector<int> missing_ranks(const std::vector<RankFlights>& all, std::uint64_t group, std::uint64_t number) {
  std::vector<int> missing;
  for (const RankFlights& flights : all) {
    const GroupFlights* const known = find_group(flights, group);
    if (known != nullptr && known->collectives_arrived < number) missing.push_back(flights.rank);
  }
  return missing;
}

const Flight* find_flight(const std::vector<RankFlights>& all, int rank, std::uint64_t group, bool is_message,
                          std::uint64_t number) {
  const RankFlights* const flights = find_rank(all, rank);
  const GroupFlights* const known = flights == nullptr ? nullptr : find_group(*flights, group);
  if (known == nullptr) return nullptr;
  for (const Flight& flight : known->flights) {
    if (flight.is_message == is_message && flight.number == number) return &flight;
  }
  return nullptr;
}

const Flight* find_other_end(const std::vector<RankFlights>& all, std::uint64_t group, const MessageCall& message, int peer) {
  const RankFlights* const flights = find_rank(all, peer);
  const GroupFlights* const known = flights == nullptr ? nullptr : find_group(*flights, group);
  if (known == nullptr) return nullptr;
  for (const Flight& flight : known->flights) {
    const MessageCall& other = flight.message;
    if (flight.is_message && other.direction != message.direction && other.peer == message.rank &&
        other.ordinal == message.ordinal) {
      return &flight;
    }
  }
  return nullptr;
}

FlightLog::FlightLog(int rank, std::uint64_t group, std::vector<int> members)
    : rank_(rank), group_(group), members_(std::move(members)), ordinals_(2 * members_.size()) {}

// Member by member: strings and vectors keep their memory.
void FlightLog::write(Entry& entry, std::uint64_t number, const Call& call, std::int64_t now_ns) {
  Flight& flight = entry.flight;
  flight.number = number;
  flight.call.kind = call.kind;
  flight.call.dtype = call.dtype;
  flight.call.elements = call.elements;
  flight.call.counts = call.counts;
  flight.call.receive_counts = call.receive_counts;
  flight.call.root = call.root;
  flight.call.options.name = call.options.name;
  flight.call.options.algorithm = call.options.algorithm;
  entry.arrived_ns = 0;
  entry.posted_ns = now_ns;
  entry.change(FlightState::posted, now_ns);
}

void FlightLog::collective_posted(std::uint64_t number, const Call& call) {
  const std::scoped_lock lock(lock_);
  if (number <= arrived_) return;
  posted_ = number;
  // What has been posted far ahead must not push out what this rank is in; it is written down when the rank comes to it.
  if (number - arrived_ < kKept / 2) write(entry_of(collectives_, number), number, call, coarse_now_ns());
}

void FlightLog::collective_arrived(const Call& call, bool is_timed) {
  const std::scoped_lock lock(lock_);
  ++arrived_;
  posted_ = std::max(posted_, arrived_);
  Entry& entry = entry_of(collectives_, arrived_);
  const std::int64_t now_ns = is_timed ? Timeline::now_ns() : coarse_now_ns();
  if (entry.flight.number != arrived_) write(entry, arrived_, call, now_ns);
  if (is_timed) entry.arrived_ns = now_ns;
  entry.change(FlightState::arrived, now_ns);
}

void FlightLog::collective_finished(FlightState state) noexcept {
  entry_of(collectives_, arrived_).change(state, coarse_now_ns());
}

std::uint64_t& FlightLog::ordinals_to(const MessageCall& message) {
  return ordinals_[static_cast<std::size_t>(message.peer) * 2 + (message.sends() ? 0 : 1)];
}

std::uint64_t FlightLog::message_posted(MessageCall& message) {
  const std::scoped_lock lock(lock_);
  message.ordinal = ++ordinals_to(message);
  Entry& entry = entry_of(messages_kept_, ++messages_);
  entry.flight.number = messages_;
  entry.flight.is_message = true;
  MessageCall& kept = entry.flight.message;
  kept.direction = message.direction;
  kept.rank = message.rank;
  kept.peer = message.peer;
  kept.elements = message.elements;
  kept.dtype = message.dtype;
  kept.envelope = message.envelope;
  kept.options.name = message.options.name;
  kept.ordinal = message.ordinal;
  entry.posted_ns = coarse_now_ns();
  entry.change(FlightState::posted, entry.posted_ns);
  return messages_;
}

void FlightLog::message_changed(std::uint64_t number, FlightState state) {
  const std::scoped_lock lock(lock_);
  Entry& entry = entry_of(messages_kept_, number);
  if (entry.flight.number == number) entry.change(state, coarse_now_ns());  // or it was pushed out by later ones
}

GroupFlights FlightLog::flights() const {
  GroupFlights result{.group = group_, .members = members_, .flights = {}};
  result.flights.reserve(2 * kKept);
  {
    const std::scoped_lock lock(lock_);
    const std::int64_t now_ns = Timeline::now_ns();
    result.collectives_posted = posted_;
    result.collectives_arrived = arrived_;
    for (const Ring* ring : {&collectives_, &messages_kept_}) {
      for (const Entry& entry : *ring) {
        if (entry.flight.number == 0) continue;
        Flight& flight = result.flights.emplace_back(entry.flight);
        flight.state = entry.state.load(std::memory_order_relaxed);
        flight.posted_seconds_ago = seconds_since(entry.posted_ns, now_ns);
        flight.changed_seconds_ago = seconds_since(entry.changed_ns.load(std::memory_order_relaxed), now_ns);
      }
    }
  }
  std::ranges::stable_sort(result.flights, is_posted_before);
  return result;
}

std::int64_t FlightLog::arrival_ns(std::uint64_t number) const {
  const std::scoped_lock lock(lock_);
  const Entry& entry = collectives_[number % kKept];
  return entry.flight.number == number && arrived_ >= number ? entry.arrived_ns : 0;
}

std::shared_ptr<FlightLog> FlightRecorder::open(int rank, std::uint64_t group, const std::vector<int>& members) {
  auto log = std::make_shared<FlightLog>(rank, group, members);
  const std::scoped_lock lock(mutex_);
  logs_.push_back(log);
  // The rank whose communicator is gone may be the one that others wait for.
  const auto is_closed = [](const auto& known) { return known.use_count() == 1; };
  for (auto closed = std::ranges::count_if(logs_, is_closed); closed > kClosedKept; --closed) {
    logs_.erase(std::ranges::find_if(logs_, is_closed));
  }
  return log;
}

std::int64_t FlightRecorder::last_arrival_ns(std::uint64_t group, std::uint64_t number) const {
  std::int64_t last_ns = 0;
  const std::scoped_lock lock(mutex_);
  for (const auto& log : logs_) {
    if (log->group() == group) last_ns = std::max(last_ns, log->arrival_ns(number));
  }
  return last_ns;
}

std::vector<RankFlights> FlightRecorder::flights() const {
  std::vector<RankFlights> all;
  const std::scoped_lock lock(mutex_);
  for (const auto& log : logs_) {
    auto found = std::ranges::find(all, log->rank(), &RankFlights::rank);
    if (found == all.end()) found = all.insert(all.end(), RankFlights{log->rank(), {}});
    found->groups.push_back(log->flights());
  }
  std::ranges::sort(all, {}, &RankFlights::rank);
  return all;
}

}  // namespace tandem

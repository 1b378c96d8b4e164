// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "optimized/comm/call.h"
#include "optimized/comm/message.h"

namespace tandem {

enum class FlightState : std::uint8_t {
  posted,   ///< issued; this rank has not come to it (collective) or does not wait for it (message)
  arrived,  ///< this rank waits in it
  done,
  failed,
};

/// One operation that a rank has issued. Collectives and messages of a group are numbered apart, from 1.
struct Flight {
  std::uint64_t number = 0;
  FlightState state = FlightState::posted;
  bool is_message = false;
  Call call{};            ///< of a collective; without addresses
  MessageCall message{};  ///< of a message; without addresses
  double posted_seconds_ago = 0;
  double changed_seconds_ago = 0;  ///< since when it is in its state
};

/// The last operations of one rank in one group, in the order in which they were posted.
struct GroupFlights {
  std::uint64_t group = 0;   ///< the same number on all its members
  std::vector<int> members;  ///< world ranks
  std::uint64_t collectives_posted = 0;
  std::uint64_t collectives_arrived = 0;  ///< this rank has come to so many
  std::vector<Flight> flights;
};

/// All groups of one rank. Plain data, to be sent to other processes.
struct RankFlights {
  int rank = 0;  ///< of the world
  std::vector<GroupFlights> groups;
};
[[nodiscard]] std::string serialise(const RankFlights& flights);
/// Throws ContractError where the text is not what serialise() makes.
[[nodiscard]] RankFlights parse_rank_flights(std::string_view text);

/// "all_reduce 'bucket 1' of 5 fp32 (no. 16 of all ranks)"; `world_ranks` of the whole world.
[[nodiscard]] std::string describe(const Flight& flight, const GroupFlights& group, int world_ranks);

/// What a rank did last: "rank 2 finished all_reduce 'bucket 1' of 5 fp32 (no. 16 of all ranks) 3.2 s ago and is in send 'x' of
/// ... for 3.1 s".
[[nodiscard]] std::string describe_last(const RankFlights& flights, int world_ranks);

/// The other end of a message, which the world rank `peer` has posted in the group; null where it is not known.
[[nodiscard]] const Flight* find_other_end(const std::vector<RankFlights>& all, std::uint64_t group, const MessageCall& message,
                                           int peer);

/// "rank 2 finished ...; rank 3 ...": describe_last() of these ranks; ranks of which nothing is known are named as such.
[[nodiscard]] std::string describe_last(const std::vector<RankFlights>& all, const std::vector<int>& ranks, int world_ranks);

/// World ranks of the members that have not come to this collective, of those whose flights are known.
[[nodiscard]] std::vector<int> missing_ranks(const std::vector<RankFlights>& all, std::uint64_t group, std::uint64_t number);

/// The record of a collective (is_message false) or message by its number; null where it is not (or no longer) there.
[[nodiscard]] const Flight* find_flight(const std::vector<RankFlights>& all, int rank, std::uint64_t group, bool is_message,
                                        std::uint64_t number);

/// A lock that costs its owner one atomic operation; for sections of a few stores, read by somebody else next to never.
class BriefLock {
 public:
  void lock() noexcept {
    while (taken_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  void unlock() noexcept { taken_.clear(std::memory_order_release); }

 private:
  std::atomic_flag taken_;
};

/// Keeps the last operations of one rank in one group. Thread-safe. It is part of every operation, of those that take half a
/// microsecond too: so it reads a clock of milliseconds where that is enough, and allocates nothing once it is warm.
class FlightLog {
 public:
  static constexpr std::size_t kKept = 32;  ///< collectives, and as many messages

  FlightLog(int rank, std::uint64_t group, std::vector<int> members);

  /// The rank has issued its `number`-th collective, which is carried out later. May be left out.
  void collective_posted(std::uint64_t number, const Call& call);
  /// The rank has come to its next collective, which is this one; the others must follow. `is_timed`: somebody will ask for its
  /// arrival_ns().
  void collective_arrived(const Call& call, bool is_timed);
  void collective_finished(FlightState state) noexcept;
  /// Returns the message's number and counts its ordinal.
  std::uint64_t message_posted(MessageCall& message);
  void message_changed(std::uint64_t number, FlightState state);

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] std::uint64_t group() const noexcept { return group_; }
  [[nodiscard]] GroupFlights flights() const;
  /// When the rank came to this collective; 0: it has not, did not time it, or that was long ago.
  [[nodiscard]] std::int64_t arrival_ns(std::uint64_t number) const;

 private:
  struct Entry {
    Flight flight;  // but for its state and times
    std::int64_t posted_ns = 0;
    std::int64_t arrived_ns = 0;
    // Stored without the lock when a collective is finished.
    std::atomic<FlightState> state{FlightState::posted};
    std::atomic<std::int64_t> changed_ns{0};

    void change(FlightState now, std::int64_t now_ns) noexcept {
      state.store(now, std::memory_order_relaxed);
      changed_ns.store(now_ns, std::memory_order_relaxed);
    }
  };
  using Ring = std::array<Entry, kKept>;

  static void write(Entry& entry, std::uint64_t number, const Call& call, std::int64_t now_ns);
  [[nodiscard]] static Entry& entry_of(Ring& ring, std::uint64_t number) { return ring[number % kKept]; }
  [[nodiscard]] std::uint64_t& ordinals_to(const MessageCall& message);

  const int rank_;
  const std::uint64_t group_;
  const std::vector<int> members_;
  mutable BriefLock lock_;
  std::uint64_t posted_ = 0, arrived_ = 0, messages_ = 0;
  Ring collectives_, messages_kept_;
  std::vector<std::uint64_t> ordinals_;  // [peer][send, recv]
};

/// The logs of the ranks that live in this process.
class FlightRecorder {
 public:
  static constexpr std::ptrdiff_t kClosedKept = 64;  ///< logs that nobody writes to any more

  [[nodiscard]] std::shared_ptr<FlightLog> open(int rank, std::uint64_t group, const std::vector<int>& members);
  [[nodiscard]] std::vector<RankFlights> flights() const;
  /// When the last of its members here came to this collective.
  [[nodiscard]] std::int64_t last_arrival_ns(std::uint64_t group, std::uint64_t number) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<FlightLog>> logs_;
};

}  // namespace tandem

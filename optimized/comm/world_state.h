// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/pitfall.h"
#include "optimized/comm/flight_recorder.h"
#include "optimized/comm/parking.h"

namespace tandem {

/// Why a world is finished.
struct Failure {
  enum class Kind : std::uint8_t {
    peer,      ///< a rank threw, aborted or ended early: PeerError
    timeout,   ///< ranks did not arrive: TimeoutError
    contract,  ///< calls that do not match: ContractError
  };
  Kind kind = Kind::peer;
  int rank = -1;        ///< world rank at fault (peer), otherwise the one that noticed
  std::string message;  ///< whole sentence
};

/// What all groups of one world share: its first failure, which ranks have ended, and what each did last. Thread-safe. One object
/// per process; where ranks are processes the transport tells each of what happened in the others (fail(), mark_ended()), and
/// hears of what happened here by add_sleepers().
class WorldState {
 public:
  /// Something with sleepers that must look again when the world changes.
  class Sleepers {
   public:
    virtual ~Sleepers() = default;
    virtual void wake() noexcept = 0;
  };
  /// Gets the flights of all ranks, of other processes too; takes at most about 100 ms and leaves out whoever does not answer.
  using FlightSource = std::function<std::vector<RankFlights>()>;

  WorldState(int ranks, std::chrono::milliseconds deadline, std::uint64_t generation);

  [[nodiscard]] int ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
  [[nodiscard]] std::chrono::milliseconds deadline() const noexcept { return deadline_; }
  [[nodiscard]] Clock::time_point deadline_from_now() const { return Clock::now() + deadline_; }
  /// For a thread that has nothing else to do (foreground) or whose rank computes meanwhile.
  [[nodiscard]] Patience patience(bool foreground) const noexcept;

  /// Keeps the first failure only, then wakes every sleeper.
  void fail(Failure failure) noexcept;
  /// Of what a rank's device threw. To be called while it is handled.
  void fail_by_device(int rank) noexcept;
  [[nodiscard]] bool failed() const noexcept { return failed_.load(); }
  /// Valid once failed().
  [[nodiscard]] const Failure& failure() const noexcept { return failure_; }
  /// Throws the failure as the exception of its kind; `during` says what this thread was doing.
  [[noreturn]] void throw_failure(const std::string& during) const;

  /// The rank's body has returned: it will arrive nowhere any more.
  void mark_ended(int rank) noexcept;
  [[nodiscard]] bool ended(int rank) const noexcept { return ended_[static_cast<std::size_t>(rank)].load(); }
  [[nodiscard]] bool any_ended() const noexcept { return any_ended_.load(); }

  void add_sleepers(std::weak_ptr<Sleepers> sleepers);

  /// Before the ranks start.
  void set_pitfalls(const PitfallSet& pitfalls) { pitfalls_ = pitfalls; }
  [[nodiscard]] const PitfallSet& pitfalls() const noexcept { return pitfalls_; }

  [[nodiscard]] FlightRecorder& recorder() noexcept { return recorder_; }
  /// Before the ranks start. None: all ranks live in this process.
  void set_flight_source(FlightSource source) { flight_source_ = std::move(source); }
  /// True: flights() of all ranks costs no message.
  [[nodiscard]] bool sees_all_flights() const noexcept { return !flight_source_; }
  [[nodiscard]] std::vector<RankFlights> flights() const { return flight_source_ ? flight_source_() : recorder_.flights(); }
  /// A number for the next group, the same nowhere else in this process.
  [[nodiscard]] std::uint64_t next_group() noexcept { return next_group_.fetch_add(1); }

 private:
  void wake_all() noexcept;

  const int ranks_;
  const std::chrono::milliseconds deadline_;
  const std::uint64_t generation_;
  const bool oversubscribed_;
  FlightRecorder recorder_;
  FlightSource flight_source_;
  PitfallSet pitfalls_;
  std::atomic<std::uint64_t> next_group_{0};

  std::mutex mutex_;  // guards sleepers_ and the one write of failure_
  std::vector<std::weak_ptr<Sleepers>> sleepers_;
  Failure failure_;  // written before failed_
  std::atomic<bool> failed_{false};
  std::vector<std::atomic<bool>> ended_;
  std::atomic<bool> any_ended_{false};
};

}  // namespace tandem

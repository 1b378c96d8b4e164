// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "optimized/comm/threads/parking.h"

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

/// What all groups of one world share: its first failure and which ranks have ended. Thread-safe.
class ThreadsWorld {
 public:
  /// Something with sleepers that must look again when the world changes.
  class Sleepers {
   public:
    virtual ~Sleepers() = default;
    virtual void wake() noexcept = 0;
  };

  ThreadsWorld(int ranks, std::chrono::milliseconds deadline, std::uint64_t generation);

  [[nodiscard]] int ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
  [[nodiscard]] std::chrono::milliseconds deadline() const noexcept { return deadline_; }
  [[nodiscard]] Clock::time_point deadline_from_now() const { return Clock::now() + deadline_; }
  /// For a thread that has nothing else to do (foreground) or whose rank computes meanwhile.
  [[nodiscard]] Patience patience(bool foreground) const noexcept;

  /// Keeps the first failure only, then wakes every sleeper.
  void fail(Failure failure) noexcept;
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

 private:
  void wake_all() noexcept;

  const int ranks_;
  const std::chrono::milliseconds deadline_;
  const std::uint64_t generation_;
  const bool oversubscribed_;

  std::mutex mutex_;  // guards sleepers_ and the one write of failure_
  std::vector<std::weak_ptr<Sleepers>> sleepers_;
  Failure failure_;  // written before failed_
  std::atomic<bool> failed_{false};
  std::vector<std::atomic<bool>> ended_;
  std::atomic<bool> any_ended_{false};
};

}  // namespace tandem

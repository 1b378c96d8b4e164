// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include "core/rng.h"
#include "core/world_settings.h"

namespace tandem::adversary {

using Clock = std::chrono::steady_clock;

/// Something that is handed on once, later than it was sent.
class Parcel {
 public:
  Parcel() = default;
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;
  virtual ~Parcel() = default;
  /// Must not block.
  virtual void deliver() noexcept = 0;
  /// Whoever sees true sees what deliver() did.
  [[nodiscard]] bool delivered() const noexcept { return delivered_.load(); }
  void mark_delivered() noexcept { delivered_.store(true); }

 private:
  std::atomic<bool> delivered_{false};
};

/// A sequence of parcels that keeps its order; those of different routes may overtake each other. Guarded by the courier.
struct Route {
  Clock::time_point last_release{};
};

/// Hands on the operations of one rank, of all its communicators, each after a delay that the script tells: a function of seed,
/// rank and count of the rank's operations. Sent by one thread, handed on by one of the courier's own, which starts with the
/// first parcel.
class Courier {
 public:
  struct Delays {
    Clock::duration before{};  ///< until the operation is handed on
    Clock::duration after{};   ///< from then until it may be complete
  };

  /// `rank`: in the world; for the script and for error texts.
  Courier(const AdversaryScript& script, int rank);
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  /// Of the rank's next operation: most are short beside the longest, so that neighbours differ.
  [[nodiscard]] Delays next_delays() noexcept;
  /// `owner` is a name for deliver_now(). After that has returned for it, the courier knows nothing of its parcels.
  void send(const void* owner, Route& route, std::shared_ptr<Parcel> parcel, Clock::duration delay);
  void wait_until_delivered(const Parcel& parcel);
  /// Hands on at once, on this thread, whatever of `owner` is still waiting, in order.
  void deliver_now(const void* owner) noexcept;

 private:
  struct Entry {
    const void* owner = nullptr;
    std::shared_ptr<Parcel> parcel;
  };
  using Key = std::pair<Clock::time_point, std::uint64_t>;  // equal times: in the order of sending

  void run(const std::stop_token& stop);
  [[nodiscard]] Clock::duration draw() noexcept;

  const double longest_seconds_;
  const int rank_;
  CounterRng rng_;
  std::mutex mutex_;
  std::condition_variable_any sent_;
  std::condition_variable delivered_;
  std::map<Key, Entry> waiting_;
  std::uint64_t sequence_ = 0;
  std::jthread thread_;  // the last member: it uses the others until it is joined
};

}  // namespace tandem::adversary

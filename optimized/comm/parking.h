// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace tandem {

using Clock = std::chrono::steady_clock;
inline constexpr Clock::time_point kNoDeadline = Clock::time_point::max();

/// How long a waiter looks before it sleeps.
struct Patience {
  int spins = 0;   ///< looks with the core kept
  int yields = 0;  ///< looks with the core offered to others
};

/// Where threads wait for a change of atomic variables: first looking, then asleep. Whoever changes a variable calls wake()
/// afterwards; that costs one load while nobody sleeps.
///
/// No wake-up is lost: the sleeper counts itself before its last look, the changer looks at the count after the change. That
/// needs one total order of the four accesses, so the variables are written and read sequentially consistent.
class Parking {
 public:
  /// Returns ready(): false only when the deadline passed.
  template <class Ready>
  [[nodiscard]] bool wait(const Ready& ready, Clock::time_point deadline, Patience patience) {
    for (int i = 0; i < patience.spins; ++i) {
      if (ready()) return true;
      relax();
    }
    for (int i = 0; i < patience.yields; ++i) {
      if (ready()) return true;
      std::this_thread::yield();
    }
    return sleep(ready, deadline);
  }

  void wake() noexcept {
    if (sleepers_.load() == 0) return;
    { const std::scoped_lock lock(mutex_); }
    changed_.notify_all();
  }

 private:
  template <class Ready>
  [[nodiscard]] bool sleep(const Ready& ready, Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1);
    bool is_ready = ready();
    bool in_time = true;
    while (!is_ready && in_time) {
      if (deadline == kNoDeadline) {
        changed_.wait(lock);
      } else {
        in_time = changed_.wait_until(lock, deadline) == std::cv_status::no_timeout;
      }
      is_ready = ready();
    }
    sleepers_.fetch_sub(1);
    return is_ready;
  }

  static void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> sleepers_{0};
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/worker_pool.h"

#include <limits>
#include <system_error>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::cpu {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A wait spins first, since waking a sleeping thread takes longer than most loops do. It yields as it spins: whoever shares the
// core goes first. Idle workers give up after the gap between two loops of a step (tens of microseconds), a caller after a block
// of a matrix product (a millisecond).
constexpr int kPausesPerYield = 32;
constexpr int kWorkerYields = 50;
constexpr int kCallerYields = 1000;

/// Returns when `value` is no longer `old`, or when the patience of `yields` is over.
void spin_while(const std::atomic<std::int32_t>& value, std::int32_t old, int yields) {
  for (int i = 0; i < yields; ++i) {
    for (int j = 0; j < kPausesPerYield; ++j) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
    std::this_thread::yield();
  }
}

}  // namespace

WorkerPool::WorkerPool(int threads) {
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (const std::system_error&) {
    const std::size_t started = workers_.size() + 1;
    stop();
    throw IoError(fmt::format("the system starts only {} of {} threads; lower threads_per_rank", started, threads));
  }
}

WorkerPool::~WorkerPool() { stop(); }

void WorkerPool::stop() noexcept {
  stopping_.store(true, std::memory_order_relaxed);
  calls_.fetch_add(1, std::memory_order_release);
  calls_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::share(std::int64_t count, Task task, void* context) {
  TANDEM_CHECK(count <= std::numeric_limits<std::int32_t>::max());
  task_ = task;
  context_ = context;
  failure_ = nullptr;
  unfinished_.store(static_cast<std::int32_t>(count), std::memory_order_relaxed);
  // Publishes the three above. A worker that is still on its way out of the last call may claim from this one: it reads the task
  // only after its claim.
  unclaimed_.store(count, std::memory_order_release);
  calls_.fetch_add(1, std::memory_order_release);
  calls_.notify_all();

  claim_and_do(0);
  for (std::int32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) {
    spin_while(unfinished_, left, kCallerYields);
    if (unfinished_.load(std::memory_order_acquire) == left) unfinished_.wait(left, std::memory_order_acquire);
  }
  if (failure_) std::rethrow_exception(failure_);
}

void WorkerPool::claim_and_do(int thread) {
  for (;;) {
    std::int64_t left = unclaimed_.load(std::memory_order_relaxed);
    do {
      if (left == 0) return;
    } while (!unclaimed_.compare_exchange_weak(left, left - 1, std::memory_order_acquire, std::memory_order_relaxed));
    try {
      task_(context_, left - 1, thread);
    } catch (...) {
      const std::lock_guard lock(failure_mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    unfinished_.fetch_sub(1, std::memory_order_release);
    unfinished_.notify_one();
  }
}

void WorkerPool::work(int thread) {
  for (std::int32_t seen = 0;;) {
    spin_while(calls_, seen, kWorkerYields);
    calls_.wait(seen, std::memory_order_acquire);
    seen = calls_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    claim_and_do(thread);
  }
}

}  // namespace tandem::cpu

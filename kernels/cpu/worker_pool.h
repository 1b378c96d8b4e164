// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace tandem::cpu {

/// The threads of one rank: the caller and `threads - 1` workers that share the items of a loop.
///
/// An item belongs to whoever claims it, and the caller waits for claimed items only: a worker that the system has put aside
/// holds nobody up, as it would at a barrier. On a machine with more runnable threads than cores (ranks with several threads
/// each, a shared CI runner) that is the difference between sharing the cores and waiting out a time slice at the end of every
/// loop.
class WorkerPool {
 public:
  /// Throws IoError where the system does not start that many.
  explicit WorkerPool(int threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  [[nodiscard]] int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  /// body(item, thread) for items [0, count), thread in [0, threads()), 0 being the caller. Who does which item, and when,
  /// varies: the result must not depend on it. The first exception of a body is thrown again here, after all items. One call at a
  /// time, no call inside a body.
  template <class Body>
  void run(std::int64_t count, Body body) {
    if (workers_.empty() || count < 2) {
      for (std::int64_t item = 0; item < count; ++item) body(item, 0);
    } else {
      share(
          count, [](void* context, std::int64_t item, int thread) { (*static_cast<Body*>(context))(item, thread); }, &body);
    }
  }

  /// body(begin, end, thread) for pieces of `grain` elements that cover [0, count).
  template <class Body>
  void run_pieces(std::int64_t count, std::int64_t grain, Body body) {
    run((count + grain - 1) / grain, [&](std::int64_t piece, int thread) {
      const std::int64_t begin = piece * grain;
      body(begin, count - begin < grain ? count : begin + grain, thread);
    });
  }

 private:
  using Task = void (*)(void* context, std::int64_t item, int thread);

  void share(std::int64_t count, Task task, void* context);
  void claim_and_do(int thread);
  void work(int thread);
  void stop() noexcept;

  Task task_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr failure_;
  std::mutex failure_mutex_;
  std::atomic<bool> stopping_{false};
  // On cache lines of their own: each is written by one side and watched by the other.
  alignas(64) std::atomic<std::int64_t> unclaimed_{0};   // items that nobody has begun
  alignas(64) std::atomic<std::int32_t> unfinished_{0};  // items whose end the caller waits for
  alignas(64) std::atomic<std::int32_t> calls_{0};       // grows with every call: what idle workers wait for
  std::vector<std::thread> workers_;
};

/// Work space of each thread, 64-byte aligned, kept from call to call and grown when a call needs more: it holds tiles, not
/// tensors.
class ThreadScratch {
 public:
  explicit ThreadScratch(int threads) : blocks_(static_cast<std::size_t>(threads)) {}

  /// Makes sure that every thread has this many bytes. Not while the pool runs.
  void reserve(std::size_t size_bytes) {
    if (size_bytes <= size_bytes_) return;
    for (auto& block : blocks_) block.reset(static_cast<std::byte*>(::operator new(size_bytes, kAlignment)));
    size_bytes_ = size_bytes;
  }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  template <class Real>
  [[nodiscard]] Real* of(int thread) const {
    return reinterpret_cast<Real*>(blocks_[static_cast<std::size_t>(thread)].get());
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* block) const { ::operator delete(block, kAlignment); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> blocks_;
  std::size_t size_bytes_ = 0;
};

}  // namespace tandem::cpu

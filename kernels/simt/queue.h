// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/gpu.h"

namespace tandem::simt_gpu {

/// One stream's work. It is put off as long as possible: until somebody synchronises with the queue or an event of it, or another
/// queue that waits for such an event is run. So a host that reads too early finds poison, and a missing wait between queues
/// shows.
///
/// Any thread may run the work; one at a time does. After an item has thrown, the rest is dropped and every later synchronisation
/// throws the same error, as a CUDA stream does.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  using Work = std::function<void()>;

  /// Into the graph while one is recorded, else behind what is there.
  void add(Work work);
  /// Runs what was added so far.
  void synchronize();
  /// Runs until `position` items of all times are done.
  void run_until(std::uint64_t position);
  [[nodiscard]] std::uint64_t added() const;
  [[nodiscard]] bool is_done(std::uint64_t position) const;
  /// Somebody has got the queue's error already.
  [[nodiscard]] bool has_thrown() const;

  [[nodiscard]] std::byte* allocate(std::int64_t size_bytes);
  void release(std::byte* block);

  void begin_recording();
  [[nodiscard]] std::shared_ptr<RecordedGraph> end_recording();
  [[nodiscard]] bool is_recording() const;
  /// Throws GpuError while a graph is recorded: CUDA does not allow `call` then.
  void check_not_recording(const char* call) const;

  /// Seed of the next launch's order; 0 always, if the queue's is 0.
  [[nodiscard]] std::uint64_t next_seed();
  void set_seed(std::uint64_t seed);  ///< 1 at first

  std::shared_ptr<Queue> self;  ///< of a queue whose handle is out

 private:
  void add_locked(Work work);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  std::uint64_t added_ = 0, done_ = 0;
  bool running_ = false;
  int waiting_ = 0;
  std::exception_ptr error_;
  bool thrown_ = false;
  std::shared_ptr<RecordedGraph> recorded_;
  // Released, but perhaps not there for other queues yet: for later allocations of this one.
  std::multimap<std::int64_t, std::byte*> reusable_;
  std::uint64_t seed_ = 1, launches_ = 0;
};

/// A graph's work, and the memory that was allocated and released in it: the graph's own until its end.
struct RecordedGraph {
  struct Nodes {
    std::vector<Queue::Work> work;
    std::vector<std::byte*> blocks;
    ~Nodes();
  };
  std::shared_ptr<Nodes> nodes = std::make_shared<Nodes>();
};

class QueueEvent {
 public:
  explicit QueueEvent(bool timed) : timed_(timed) {}
  void record(Queue& queue);
  void make_wait(Queue& queue);
  void synchronize();
  [[nodiscard]] bool is_reached();
  [[nodiscard]] std::int64_t time_ns();

 private:
  struct Point {
    std::shared_ptr<Queue> queue;
    std::uint64_t position = 0;
    std::int64_t time_ns = 0;
    bool asked = false;
  };
  [[nodiscard]] std::shared_ptr<Point> point() const;

  bool timed_;
  mutable std::mutex mutex_;
  std::shared_ptr<Point> point_;  // null: never recorded
};

/// Whether host code that touches memory of the emulated GPU crashes; it does at first. Off: faster.
void set_memory_protection(bool on);

}  // namespace tandem::simt_gpu

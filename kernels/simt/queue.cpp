// SPDX-License-Identifier: Apache-2.0
#include "kernels/simt/queue.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/simt/heap.h"

namespace tandem::simt_gpu {
void Queue::add_locked(Work work) {
  if (recorded_ != nullptr) {
    recorded_->nodes->work.push_back(std::move(work));
    return;
  }
  work_.push_back(std::move(work));
  ++added_;
}

void Queue::add(Work work) {
  const std::lock_guard lock(mutex_);
  add_locked(std::move(work));
}

std::uint64_t Queue::added() const {
  const std::lock_guard lock(mutex_);
  return added_;
}

bool Queue::is_done(std::uint64_t position) const {
  const std::lock_guard lock(mutex_);
  return done_ >= position;
}

bool Queue::has_thrown() const {
  const std::lock_guard lock(mutex_);
  return thrown_;
}

void Queue::synchronize() {
  check_not_recording("synchronize");
  run_until(added());
}

void Queue::run_until(std::uint64_t position) {
  std::unique_lock lock(mutex_);
  while (done_ < position) {
    if (running_) {
      ++waiting_;
      changed_.wait(lock);
      --waiting_;
      continue;
    }
    running_ = true;
    lock.unlock();
    {
      const Heap::Access access(heap());
      lock.lock();
      while (done_ < position) {
        Work work = std::move(work_.front());
        work_.pop_front();
        const bool dropped = error_ != nullptr;
        lock.unlock();
        std::exception_ptr error;
        try {
          if (!dropped) work();
        } catch (...) {
          error = std::current_exception();
        }
        work = nullptr;
        lock.lock();
        if (error != nullptr) error_ = std::move(error);
        ++done_;
        if (waiting_ > 0) changed_.notify_all();
      }
      lock.unlock();
    }
    lock.lock();
    running_ = false;
    if (done_ == added_) {
      for (const auto& [size_bytes, block] : reusable_) heap().release(block);
      reusable_.clear();
    }
    changed_.notify_all();
  }
  if (error_ == nullptr) return;
  thrown_ = true;
  std::rethrow_exception(error_);
}

std::byte* Queue::allocate(std::int64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  std::byte* block = nullptr;
  if (const auto fits = reusable_.find(size_bytes); fits != reusable_.end() && recorded_ == nullptr) {
    block = fits->second;
    reusable_.erase(fits);
  } else {
    block = heap().allocate(size_bytes);
  }
  add_locked([block, size_bytes] { Heap::poison(block, size_bytes); });
  return block;
}

void Queue::release(std::byte* block) {
  const std::int64_t size_bytes = heap().size_bytes(block);
  const std::lock_guard lock(mutex_);
  const auto is_this = [block](const auto& entry) { return entry.second == block; };
  if (size_bytes < 0 || std::any_of(reusable_.begin(), reusable_.end(), is_this)) {
    add_locked([address = static_cast<const void*>(block)] {
      throw GpuError(fmt::format("emulated GPU: release: nothing is allocated at {}", address));
    });
    return;
  }
  add_locked([block, size_bytes] {
    Heap::check_gap(block, size_bytes);
    Heap::poison(block, size_bytes);
  });
  if (recorded_ != nullptr) {
    recorded_->nodes->blocks.push_back(block);
  } else {
    reusable_.emplace(size_bytes, block);
  }
}

void Queue::begin_recording() {
  const std::lock_guard lock(mutex_);
  if (recorded_ != nullptr) throw GpuError("emulated GPU: begin_capture: the stream is being captured already");
  recorded_ = std::make_shared<RecordedGraph>();
}

std::shared_ptr<RecordedGraph> Queue::end_recording() {
  const std::lock_guard lock(mutex_);
  if (recorded_ == nullptr) throw GpuError("emulated GPU: end_capture: the stream is not being captured");
  return std::exchange(recorded_, nullptr);
}

bool Queue::is_recording() const {
  const std::lock_guard lock(mutex_);
  return recorded_ != nullptr;
}

void Queue::check_not_recording(const char* call) const {
  if (is_recording()) throw GpuError(fmt::format("emulated GPU: {}: not allowed while the stream is being captured", call));
}

std::uint64_t Queue::next_seed() {
  const std::lock_guard lock(mutex_);
  return seed_ == 0 ? 0 : seed_ * 0x9E3779B97F4A7C15ULL + ++launches_;
}

void Queue::set_seed(std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  seed_ = seed;
  launches_ = 0;
}

RecordedGraph::Nodes::~Nodes() {
  work.clear();
  for (std::byte* const block : blocks) heap().release(block);
}

void QueueEvent::record(Queue& queue) {
  queue.check_not_recording("record");
  auto point = std::make_shared<Point>();
  queue.add([point] {
    point->time_ns =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  });
  point->queue = queue.shared_from_this();
  point->position = queue.added();
  const std::lock_guard lock(mutex_);
  point_ = std::move(point);
}

std::shared_ptr<QueueEvent::Point> QueueEvent::point() const {
  const std::lock_guard lock(mutex_);
  return point_;
}

void QueueEvent::make_wait(Queue& queue) {
  queue.check_not_recording("wait_for");
  const std::shared_ptr<Point> until = point();
  if (until == nullptr || until->queue.get() == &queue) return;
  queue.add([until] { until->queue->run_until(until->position); });
}

void QueueEvent::synchronize() {
  if (const std::shared_ptr<Point> until = point(); until != nullptr) until->queue->run_until(until->position);
}

/// Not at the first question after the event was recorded, though nothing hinders: a caller that relies on it shows. Later ones
/// run the work, so that a loop of questions ends.
bool QueueEvent::is_reached() {
  const std::shared_ptr<Point> until = point();
  if (until == nullptr || until->queue->is_done(until->position)) return true;
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(until->asked, true)) return false;
  }
  until->queue->run_until(until->position);
  return true;
}

std::int64_t QueueEvent::time_ns() {
  const std::shared_ptr<Point> at = point();
  if (!timed_ || at == nullptr) throw GpuError("emulated GPU: seconds_between: an event that is not timed or never recorded");
  if (!at->queue->is_done(at->position)) throw GpuError("emulated GPU: seconds_between: an event that is not reached yet");
  return at->time_ns;
}

}  // namespace tandem::simt_gpu

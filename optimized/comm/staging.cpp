// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/staging.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/timeline.h"

namespace tandem {
namespace {

// What lies in one copy: a buffer of the call, or two where one lies within the other.
struct Region {
  std::byte* begin = nullptr;
  std::byte* end = nullptr;

  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(end - begin); }
};

Region region_of(std::span<std::byte> bytes) { return {bytes.data(), bytes.data() + bytes.size()}; }

bool overlap(const Region& a, const Region& b) { return a.begin < b.end && b.begin < a.end; }

// The device of one rank fails the world.
template <class Action>
void with_device(const Group& group, const Action& action) {
  try {
    action();
  } catch (...) {
    group.world().fail_by_device(group.world_rank());
    throw;
  }
}

}  // namespace

std::span<std::byte> StagingBuffer::bytes(std::size_t size) {
  if (size_ < size) {
    bytes_.reset();
    bytes_ = std::make_unique_for_overwrite<std::byte[]>(size);
    size_ = size;
  }
  return {bytes_.get(), size};
}

std::int64_t run_staged(Group& group, const Call& call, bool foreground, const std::atomic<bool>& cancelled, PhaseTimes* times,
                        StagingBuffer& staging) {
  const CallBuffers buffers = buffers_of(call, group.rank());
  Region read = region_of(buffers.read);
  Region written = region_of(buffers.written);
  const bool is_shared = overlap(read, written);
  if (is_shared) read = written = {std::min(read.begin, written.begin), std::max(read.end, written.end)};
  const std::span<std::byte> copies = staging.bytes(read.size() + (is_shared ? 0 : written.size()));
  const auto place_of = [&](std::byte* address, const Region& region, std::size_t offset) {
    return copies.data() + offset + (address - region.begin);
  };
  std::byte* const input = place_of(buffers.read.data(), read, 0);
  std::byte* const output = place_of(buffers.written.data(), written, is_shared ? 0 : read.size());

  Memory& lane = *call.device.lane;
  with_device(group, [&] {
    if (call.device.ready) lane.begin_after(*call.device.ready);
    if (!buffers.read.empty()) lane.read(buffers.read.data(), input, std::ssize(buffers.read));
  });
  Call staged = call;
  staged.device = {};
  staged.input = buffers.read.empty() ? output : input;
  staged.output = buffers.written.empty() ? input : output;
  const std::int64_t bytes = group.run(staged, foreground, cancelled, times);
  with_device(group, [&] {
    if (buffers.written.empty()) return;
    lane.write(output, buffers.written.data(), std::ssize(buffers.written));
    lane.synchronize();
  });
  if (times != nullptr) times->end_ns = Timeline::now_ns();
  return bytes;
}

StagedMessage::StagedMessage(std::shared_ptr<Group> group, MessageCall call)
    : PostedMessage(std::move(call)), group_(std::move(group)) {
  if (call_.device) copy_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(call_.size_bytes()));
}

void StagedMessage::post() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (phase_ != Phase::queued) return;
    phase_ = Phase::reading;
  }
  try {
    MessageCall of_copy = call_;
    if (call_.device) {
      of_copy.data = copy_.get();
      of_copy.device = {};
      if (call_.sends()) {
        with_device(*group_, [&] {
          call_.device.lane->begin_after(*call_.device.ready);
          call_.device.lane->read(call_.data, copy_.get(), call_.size_bytes());
        });
      }
    }
    inner_ = group_->post(std::move(of_copy)).message;
    settle(Phase::posted);
  } catch (...) {
    error_ = std::current_exception();
    settle(Phase::failed);
  }
}

void StagedMessage::fail(std::exception_ptr error) noexcept {
  const std::scoped_lock lock(mutex_);
  if (phase_ != Phase::queued) return;
  error_ = std::move(error);
  phase_ = Phase::failed;
  changed_.notify_all();
}

void StagedMessage::settle(Phase phase) noexcept {
  const std::scoped_lock lock(mutex_);
  phase_ = phase;
  changed_.notify_all();
}

void StagedMessage::write_back() const {
  if (call_.sends() || !call_.device || std::exchange(written_back_, true)) return;
  with_device(*group_, [&] {
    Memory& lane = *call_.device.lane;
    lane.begin_after(*call_.device.ready);
    lane.write(copy_.get(), call_.data, call_.size_bytes());
    lane.synchronize();
  });
}

bool StagedMessage::done() const noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  if (phase_ == Phase::failed || error_) return true;
  if (phase_ != Phase::posted || !inner_->done()) return false;
  try {
    write_back();
  } catch (...) {
    error_ = std::current_exception();  // wait() will say what it is
  }
  return true;
}

void StagedMessage::advance() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock() && phase_ == Phase::posted) inner_->advance();
}

MessageTimes StagedMessage::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return phase_ == Phase::posted || phase_ == Phase::failed; });
  if (error_) std::rethrow_exception(error_);
  MessageTimes times = inner_->wait();
  write_back();
  if (!call_.sends() && call_.device) times.end_ns = Timeline::now_ns();
  return times;
}

void StagedMessage::cancel() noexcept {
  std::unique_lock lock(mutex_);
  if (phase_ == Phase::queued) phase_ = Phase::failed;
  changed_.wait(lock, [&] { return phase_ == Phase::posted || phase_ == Phase::failed; });
  if (inner_) inner_->cancel();
}

Group::Posted MessageStager::post(MessageCall call) {
  const bool sends = call.sends();
  const std::scoped_lock lock(mutex_);
  if (!call.device && (!sends || queue_.empty())) return group_->post(std::move(call));
  auto message = std::make_shared<StagedMessage>(group_, std::move(call));
  if (!sends) {
    message->post();
    return {std::move(message), true};
  }
  queue_.push_back(message);
  if (!thread_.joinable()) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  changed_.notify_one();
  return {std::move(message), false};
}

void MessageStager::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [&] { return !queue_.empty(); }) && !stop.stop_requested()) {
    const std::shared_ptr<StagedMessage> message = queue_.front();
    lock.unlock();
    message->post();
    lock.lock();
    queue_.pop_front();
  }
}

void MessageStager::close() noexcept {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  thread_.join();
  for (const auto& message : queue_) {
    message->fail(std::make_exception_ptr(ContractError("the communicator of this operation is gone")));
  }
  queue_.clear();
}

}  // namespace tandem

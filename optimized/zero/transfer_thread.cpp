// SPDX-License-Identifier: Apache-2.0
#include "optimized/zero/transfer_thread.h"

#include <fmt/format.h>

#include <utility>

#include "core/error.h"

namespace tandem {

TransferThread::TransferThread() : thread_([this](const std::stop_token& stop) { run(stop); }) {}

TransferThread::~TransferThread() {
  thread_.request_stop();
  thread_.join();
}

TransferThread::Ticket TransferThread::submit(std::function<void()> job) {
  Ticket ticket = 0;
  {
    const std::scoped_lock lock(mutex_);
    ticket = ++last_submitted_;
    if (failure_) {
      last_ended_ = ticket;
    } else {
      jobs_.push_back(std::move(job));
    }
  }
  submitted_.notify_one();
  return ticket;
}

void TransferThread::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  TANDEM_CHECK(ticket <= last_submitted_, fmt::format("ticket {} of {}", ticket, last_submitted_));
  ended_.wait(lock, [&] { return last_ended_ >= ticket; });
  if (failure_) std::rethrow_exception(failure_);
}

void TransferThread::drain() noexcept {
  std::unique_lock lock(mutex_);
  last_submitted_ -= static_cast<Ticket>(jobs_.size());
  jobs_.clear();
  ended_.wait(lock, [&] { return last_ended_ == last_submitted_; });
  failure_ = nullptr;
}

void TransferThread::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (submitted_.wait(lock, stop, [&] { return !jobs_.empty(); }) && !stop.stop_requested()) {
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    try {
      job();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    ++last_ended_;
    if (failure) {
      failure_ = failure;
      last_ended_ = last_submitted_;
      jobs_.clear();
    }
    ended_.notify_all();
  }
}

}  // namespace tandem

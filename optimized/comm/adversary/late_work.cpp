// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/adversary/late_work.h"

#include <thread>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::adversary {

LateWork::LateWork(std::shared_ptr<Line> line, Order order, Courier::Delays delays)
    : line_(std::move(line)),
      order_(std::move(order)),
      delays_(delays),
      custody_(order_.input, order_.output, line_->memory_of(order_.input.size_bytes() > 0 ? order_.input : order_.output)) {
  if (line_->lane) ready_ = line_->memory->mark();
}

void LateWork::deliver() noexcept {
  try {
    if (ready_) line_->lane->begin_after(*ready_);
    inner_ = order_.issue(custody_.input(), custody_.output());
  } catch (...) {
    issue_error_ = std::current_exception();
  }
  ready_at_ = Clock::now() + delays_.after;
}

void LateWork::deliver_here() {
  deliver();
  mark_delivered();
  if (!issue_error_) return;
  take_back();
  std::rethrow_exception(issue_error_);
}

void LateWork::wait() {
  {
    const SpanScope span(delivered() ? nullptr : line_->timeline.load(), order_.what, Activity::wait, order_.step);
    line_->courier->wait_until_delivered(*this);
  }
  std::exception_ptr error = issue_error_;
  try {
    inner_.wait_host();
  } catch (...) {
    error = std::current_exception();
  }
  if (!error && Clock::now() < ready_at_) {
    const SpanScope span(line_->timeline.load(), order_.what, Activity::wait, order_.step);
    std::this_thread::sleep_until(ready_at_);
  }
  take_back();
  if (error) std::rethrow_exception(error);
  if (take_back_error_) std::rethrow_exception(take_back_error_);
  if (disturbance_) {
    throw ContractError(fmt::format("rank {}: {} while {} was under way", line_->courier->rank(), *disturbance_, order_.what));
  }
}

bool LateWork::done() const noexcept {
  if (taken_back_) return true;
  if (!delivered() || Clock::now() < ready_at_ || !inner_.done()) return false;
  take_back();
  return true;
}

void LateWork::take_back() const noexcept {
  if (std::exchange(taken_back_, true)) return;
  try {
    disturbance_ = custody_.disturbance();
    custody_.hand_back();
  } catch (...) {
    take_back_error_ = std::current_exception();
  }
}

void LateWork::drop() noexcept {
  // The inner communicator must hear of it, and of what was to come before it, to know what the ranks have agreed on.
  line_->courier->deliver_now(line_.get());
  line_->dropped = true;
  inner_ = Work();
}

}  // namespace tandem::adversary

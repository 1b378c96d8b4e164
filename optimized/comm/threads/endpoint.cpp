// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/endpoint.h"

#include <exception>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

CollectiveState::CollectiveState(std::shared_ptr<Endpoint> endpoint, Call call)
    : endpoint_(std::move(endpoint)), call_(std::move(call)) {}
CollectiveState::~CollectiveState() = default;
void CollectiveState::wait() { endpoint_->wait(*this); }
void CollectiveState::drop() noexcept { endpoint_->drop(*this); }

MessageState::MessageState(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<Message> message)
    : endpoint_(std::move(endpoint)), message_(std::move(message)) {}
MessageState::~MessageState() = default;
void MessageState::wait() { endpoint_->wait(message_); }
void MessageState::drop() noexcept { endpoint_->drop(message_); }

Endpoint::Endpoint(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}
Endpoint::~Endpoint() = default;

std::shared_ptr<CollectiveState> Endpoint::issue(Call call) {
  require_none_dropped();
  auto state = std::make_shared<CollectiveState>(shared_from_this(), std::move(call));
  const bool in_background = state->call_.options.progress == Progress::background && group_->size() > 1;
  Lock lock(mutex_);
  if (in_background) start_progress_thread();
  queue_.push_back(state);
  if (in_background) {
    ++background_;
    changed_.notify_all();
  }
  if (group_->size() == 1) run_front(lock, Lane::compute);
  return state;
}

std::shared_ptr<MessageState> Endpoint::issue(std::shared_ptr<Message> message) {
  require_none_dropped();
  const bool paired = group_->mailbox().post(message);
  if (paired && group_->size() == 1) {
    group_->mailbox().try_copy(message);
  } else if (paired && message->options.progress == Progress::background) {
    const Lock lock(mutex_);
    matched_.push_back(message);
    start_progress_thread();
    changed_.notify_all();
  }
  return std::make_shared<MessageState>(shared_from_this(), std::move(message));
}

void Endpoint::start_progress_thread() {
  if (progress_thread_.joinable()) return;
  progress_thread_ = std::jthread([this](const std::stop_token& stop) { progress(stop); });
}

void Endpoint::progress(const std::stop_token& stop) {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop.stop_requested() || !matched_.empty() || (background_ > 0 && running_ == nullptr); });
    if (stop.stop_requested()) return;
    if (matched_.empty()) {
      run_front(lock, Lane::communication);
      continue;
    }
    const std::shared_ptr<Message> message = std::move(matched_.front());
    matched_.pop_front();
    lock.unlock();
    group_->mailbox().try_copy(message);
    lock.lock();
  }
}

void Endpoint::run_front(Lock& lock, Lane lane) {
  const std::shared_ptr<CollectiveState> state = std::move(queue_.front());
  queue_.pop_front();
  if (state->call_.options.progress == Progress::background && group_->size() > 1) --background_;
  running_ = state.get();
  lock.unlock();
  std::exception_ptr error;
  try {
    execute(state->call_, lane);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  running_ = nullptr;
  finish(*state, std::move(error));
  changed_.notify_all();
}

void Endpoint::execute(Call& call, Lane lane) {
  const Timeline* const timeline = timeline_.load();
  const bool is_timed = timeline != nullptr && timeline->enabled() && group_->size() > 1;
  PhaseTimes times;
  group_->run(rank_, call, lane == Lane::compute, cancel_running_, is_timed ? &times : nullptr);
  const std::int64_t bytes = wire_bytes(call, rank_, group_->size());
  count_bytes(call.options.purpose, bytes);
  if (!is_timed) return;
  const std::string what = describe(call);
  record(call.options, what, Activity::wait, lane, times.begin_ns, times.opened_ns, 0);
  record(call.options, what, Activity::transfer, lane, times.opened_ns, times.end_ns, bytes);
}

void Endpoint::finish(CollectiveState& state, std::exception_ptr error) noexcept {
  state.error_ = std::move(error);
  state.finished_.store(true);
}

void Endpoint::wait(CollectiveState& state) {
  Lock lock(mutex_);
  std::int64_t asleep_since_ns = 0;
  while (!state.finished_.load()) {
    if (running_ == nullptr) {
      run_front(lock, Lane::compute);
    } else {
      if (asleep_since_ns == 0) asleep_since_ns = Timeline::now_ns();
      changed_.wait(lock);
    }
  }
  const std::exception_ptr error = std::move(state.error_);
  lock.unlock();
  if (asleep_since_ns != 0) {
    record(state.call_.options, describe(state.call_), Activity::wait, Lane::compute, asleep_since_ns, Timeline::now_ns(), 0);
  }
  if (error) std::rethrow_exception(error);
  require_none_dropped();
}

void Endpoint::wait(const std::shared_ptr<Message>& message) {
  const std::int64_t begin_ns = Timeline::now_ns();
  const bool copied_here = group_->mailbox().wait(message);
  const std::int64_t end_ns = Timeline::now_ns();
  const bool sends = message->direction == Message::Direction::send && message->peer != message->rank;
  const std::int64_t bytes = sends ? message->elements * static_cast<std::int64_t>(size_bytes(message->dtype)) : 0;
  count_bytes(message->options.purpose, bytes);
  if (timeline_.load() != nullptr) {
    const std::string what = describe(*message, group_->members());
    const std::int64_t waited_until_ns = copied_here ? message->copy_begin_ns : end_ns;
    const Lane lane = copied_here ? Lane::compute : Lane::communication;
    if (copied_here) record(message->options, what, Activity::wait, Lane::compute, begin_ns, waited_until_ns, 0);
    record(message->options, what, Activity::transfer, lane, message->copy_begin_ns, message->copy_end_ns, bytes);
    if (!copied_here) record(message->options, what, Activity::wait, Lane::compute, begin_ns, waited_until_ns, 0);
  }
  require_none_dropped();
}

void Endpoint::drop(CollectiveState& state) noexcept {
  Lock lock(mutex_);
  const bool is_unwinding = std::uncaught_exceptions() > 0;
  if (state.finished_.load()) {
    if (!is_unwinding) note_dropped(describe(state.call_));
    return;
  }
  note_dropped(describe(state.call_));
  cancel_queue();  // also what comes later: without this one the ranks would be out of step
  if (running_ != &state) return;
  cancel_running_.store(true);
  lock.unlock();
  group_->wake();
  lock.lock();
  changed_.wait(lock, [&] { return state.finished_.load(); });
  cancel_running_.store(false);
}

void Endpoint::drop(const std::shared_ptr<Message>& message) noexcept {
  group_->mailbox().cancel(message);
  const Lock lock(mutex_);
  if (std::uncaught_exceptions() == 0) note_dropped(describe(*message, group_->members()));
}

void Endpoint::note_dropped(const std::string& what) noexcept {
  if (!dropped_.empty()) return;
  dropped_ = fmt::format("rank {} dropped {} without waiting for it", group_->members()[static_cast<std::size_t>(rank_)], what);
}

void Endpoint::cancel_queue() noexcept {
  for (const auto& state : queue_) finish(*state, std::make_exception_ptr(ContractError(dropped_)));
  queue_.clear();
  background_ = 0;
  changed_.notify_all();
}

void Endpoint::require_none_dropped() const {
  const Lock lock(mutex_);
  if (!dropped_.empty()) throw ContractError(dropped_);
}

void Endpoint::close() noexcept {
  {
    Lock lock(mutex_);
    if (dropped_.empty()) dropped_ = "the communicator of this operation is gone";
    cancel_queue();
    if (running_ != nullptr) {
      cancel_running_.store(true);
      lock.unlock();
      group_->wake();
      lock.lock();
      changed_.wait(lock, [&] { return running_ == nullptr; });
    }
    progress_thread_.request_stop();
    changed_.notify_all();
  }
  if (progress_thread_.joinable()) progress_thread_.join();
}

void Endpoint::count_bytes(Purpose purpose, std::int64_t bytes) noexcept {
  bytes_sent_[static_cast<std::size_t>(purpose)].fetch_add(bytes, std::memory_order_relaxed);
}

void Endpoint::record(const CommOptions& options, const std::string& what, Activity activity, Lane lane, std::int64_t begin_ns,
                      std::int64_t end_ns, std::int64_t bytes) noexcept {
  Timeline* const timeline = timeline_.load();
  if (timeline == nullptr) return;
  timeline->record({.name = what,
                    .activity = activity,
                    .purpose = options.purpose,
                    .lane = lane,
                    .bytes = bytes,
                    .step = options.step,
                    .begin_ns = begin_ns,
                    .end_ns = end_ns});
}

}  // namespace tandem

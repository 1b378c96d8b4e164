// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/endpoint.h"

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

MessageState::MessageState(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<PostedMessage> message, std::uint64_t number)
    : endpoint_(std::move(endpoint)), message_(std::move(message)), number_(number) {}
MessageState::~MessageState() = default;
void MessageState::wait() { endpoint_->wait(*this); }
void MessageState::drop() noexcept { endpoint_->drop(*this); }

Endpoint::Endpoint(std::shared_ptr<Group> group)
    : group_(std::move(group)),
      log_(group_->size() == 1 ? nullptr
                               : group_->world().recorder().open(group_->world_rank(), group_->id(), group_->members())) {}
Endpoint::~Endpoint() = default;

std::shared_ptr<CollectiveState> Endpoint::issue(Call call) {
  require_none_dropped();
  place(call);
  auto state = std::make_shared<CollectiveState>(shared_from_this(), std::move(call));
  const bool in_background = state->call_.options.progress == Progress::background && group_->size() > 1;
  Lock lock(mutex_);
  ++issued_;
  if (log_ && in_background) {
    state->call_.issued_ns = Timeline::now_ns();
    log_->collective_posted(issued_, state->call_);
  }
  if (in_background) start_progress_thread();
  queue_.push_back(state);
  if (in_background) {
    ++background_;
    changed_.notify_all();
  }
  if (group_->size() == 1) run_front(lock, Lane::compute);
  return state;
}

std::shared_ptr<MessageState> Endpoint::issue(MessageCall call) {
  require_none_dropped();
  place(call);
  const std::uint64_t number = log_ ? log_->message_posted(call) : 0;
  Group::Posted posted = post(std::move(call));
  const std::shared_ptr<PostedMessage>& message = posted.message;
  if (posted.can_advance && group_->size() == 1) {
    message->advance();
  } else if (posted.can_advance && message->call().options.progress == Progress::background) {
    const Lock lock(mutex_);
    ready_.push_back(message);
    start_progress_thread();
    changed_.notify_all();
  }
  return std::make_shared<MessageState>(shared_from_this(), std::move(posted.message), number);
}

// Says where the buffers lie.
void Endpoint::place(Call& call) {
  if (lanes_.memory() == nullptr) return;
  const auto [read, written] = buffers_of(call, rank());
  const bool reads_device = lanes_.on_device(read);
  const bool writes_device = lanes_.on_device(written);
  if (!reads_device && !writes_device) return;
  if ((!reads_device && !read.empty()) || (!writes_device && !written.empty())) {
    const auto place_of = [&](bool is_device) { return is_device ? lanes_.memory()->description() : "host memory"; };
    throw ContractError(fmt::format("rank {}: input of {} lies in {}, output in {}", group_->world_rank(), describe(call),
                                    place_of(reads_device), place_of(writes_device)));
  }
  call.device = group_->size() == 1 ? lanes_.in_rank_order() : lanes_.for_collective();
}

void Endpoint::place(MessageCall& call) {
  if (!lanes_.on_device({call.data, static_cast<std::size_t>(call.size_bytes())})) return;
  call.device = group_->size() == 1 ? lanes_.in_rank_order() : lanes_.for_message();
}

Group::Posted Endpoint::post(MessageCall call) {
  if (!stager_ && (!call.device || group_->takes_device_memory())) return group_->post(std::move(call));
  if (!stager_) stager_.emplace(group_);
  return stager_->post(std::move(call));
}

void Endpoint::start_progress_thread() {
  if (progress_thread_.joinable()) return;
  progress_thread_ = std::jthread([this](const std::stop_token& stop) { progress(stop); });
}

void Endpoint::progress(const std::stop_token& stop) {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop.stop_requested() || !ready_.empty() || (background_ > 0 && running_ == nullptr); });
    if (stop.stop_requested()) return;
    if (ready_.empty()) {
      run_front(lock, Lane::communication);
      continue;
    }
    const std::shared_ptr<PostedMessage> message = std::move(ready_.front());
    ready_.pop_front();
    lock.unlock();
    message->advance();
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
  const bool is_observed = timeline != nullptr && timeline->observer() != nullptr;
  const ObservedRange range(timeline, is_observed ? describe(call) : std::string(), Activity::transfer);
  PhaseTimes times;
  if (log_) log_->collective_arrived(call, is_timed);
  std::int64_t bytes = 0;
  try {
    const bool foreground = lane == Lane::compute;
    PhaseTimes* const timed = is_timed ? &times : nullptr;
    bytes = !call.device || group_->takes_device_memory()
                ? group_->run(call, foreground, cancel_running_, timed)
                : run_staged(*group_, call, foreground, cancel_running_, timed, staging_);
  } catch (...) {
    if (log_) log_->collective_finished(FlightState::failed);
    throw;
  }
  if (log_) log_->collective_finished(FlightState::done);
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

void Endpoint::wait(MessageState& state) {
  PostedMessage& message = *state.message_;
  const MessageCall& call = message.call();
  const std::int64_t begin_ns = Timeline::now_ns();
  if (log_) log_->message_changed(state.number_, FlightState::arrived);
  MessageTimes times;
  try {
    times = message.wait();
  } catch (...) {
    if (log_) log_->message_changed(state.number_, FlightState::failed);
    throw;
  }
  if (log_) log_->message_changed(state.number_, FlightState::done);
  const std::int64_t bytes = call.sends() && call.peer != call.rank ? call.size_bytes() : 0;
  count_bytes(call.options.purpose, bytes);
  if (timeline_.load() != nullptr) record_message(call, times, begin_ns, Timeline::now_ns(), bytes);
  require_none_dropped();
}

void Endpoint::record_message(const MessageCall& call, const MessageTimes& times, std::int64_t begin_ns, std::int64_t end_ns,
                              std::int64_t bytes) noexcept {
  const std::string what = describe(call, group_->members());
  const bool here = times.moved_here;
  if (here) record(call.options, what, Activity::wait, Lane::compute, begin_ns, times.begin_ns, 0);
  record(call.options, what, Activity::transfer, here ? Lane::compute : Lane::communication, times.begin_ns, times.end_ns, bytes);
  if (!here) record(call.options, what, Activity::wait, Lane::compute, begin_ns, end_ns, 0);
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

void Endpoint::drop(MessageState& state) noexcept {
  state.message_->cancel();
  const Lock lock(mutex_);
  if (std::uncaught_exceptions() == 0) note_dropped(describe(state.message_->call(), group_->members()));
}

void Endpoint::note_dropped(const std::string& what) noexcept {
  if (!dropped_.empty()) return;
  dropped_ = fmt::format("rank {} dropped {} without waiting for it", group_->world_rank(), what);
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
  if (stager_) stager_->close();
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

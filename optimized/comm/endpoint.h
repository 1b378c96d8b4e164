// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/timeline.h"
#include "optimized/comm/flight_recorder.h"
#include "optimized/comm/group.h"
#include "optimized/comm/staging.h"
#include "optimized/comm/work_state.h"

namespace tandem {

class Endpoint;

/// A collective that a rank has issued.
class CollectiveState final : public Work::State {
 public:
  CollectiveState(std::shared_ptr<Endpoint> endpoint, Call call);
  ~CollectiveState() override;
  void wait() override;
  [[nodiscard]] bool done() const noexcept override { return finished_.load(); }
  void drop() noexcept override;

  [[nodiscard]] Call& call() noexcept { return call_; }

 private:
  friend class Endpoint;
  std::shared_ptr<Endpoint> endpoint_;
  Call call_;
  std::exception_ptr error_;  // guarded by the endpoint
  std::atomic<bool> finished_{false};
};

/// A send or receive that a rank has posted.
class MessageState final : public Work::State {
 public:
  MessageState(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<PostedMessage> message, std::uint64_t number);
  ~MessageState() override;
  void wait() override;
  [[nodiscard]] bool done() const noexcept override { return message_->done(); }
  void drop() noexcept override;

 private:
  friend class Endpoint;
  std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<PostedMessage> message_;
  std::uint64_t number_;  // in the flight log
};

/// One rank's side of a group: the queue of its collectives and the thread that carries them out in the background.
///
/// Collectives are carried out one at a time in the order of issue, by the progress thread or by a thread inside wait(),
/// whichever comes first. Messages are independent of them. The progress thread starts with the first operation that needs it.
class Endpoint : public std::enable_shared_from_this<Endpoint> {
 public:
  explicit Endpoint(std::shared_ptr<Group> group);
  ~Endpoint();

  [[nodiscard]] Group& group() noexcept { return *group_; }
  [[nodiscard]] const Group& group() const noexcept { return *group_; }
  [[nodiscard]] int rank() const noexcept { return group_->rank(); }

  [[nodiscard]] std::shared_ptr<CollectiveState> issue(Call call);
  [[nodiscard]] std::shared_ptr<MessageState> issue(MessageCall call);

  /// Throws ContractError when an operation was dropped without having been waited for.
  void require_none_dropped() const;
  /// Cancels what is pending and joins the progress thread. Called by the communicator's destructor.
  void close() noexcept;

  void set_timeline(Timeline* timeline) noexcept { timeline_.store(timeline); }
  [[nodiscard]] Timeline* timeline() const noexcept { return timeline_.load(); }
  /// By the thread that issues, while nothing is under way.
  void set_memory(Memory* memory) { lanes_.set_memory(memory); }
  [[nodiscard]] Memory* memory() const noexcept { return lanes_.memory(); }
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept {
    return bytes_sent_[static_cast<std::size_t>(purpose)].load();
  }

 private:
  friend class CollectiveState;
  friend class MessageState;
  using Lock = std::unique_lock<std::mutex>;

  void wait(CollectiveState& state);
  void drop(CollectiveState& state) noexcept;
  void wait(MessageState& state);
  void drop(MessageState& state) noexcept;

  void place(Call& call);
  void place(MessageCall& call);
  [[nodiscard]] Group::Posted post(MessageCall call);
  void start_progress_thread();
  void progress(const std::stop_token& stop);
  void run_front(Lock& lock, Lane lane);
  void execute(Call& call, Lane lane);
  void record_message(const MessageCall& call, const MessageTimes& times, std::int64_t begin_ns, std::int64_t end_ns,
                      std::int64_t bytes) noexcept;
  void finish(CollectiveState& state, std::exception_ptr error) noexcept;
  void cancel_queue() noexcept;
  void note_dropped(const std::string& what) noexcept;
  void count_bytes(Purpose purpose, std::int64_t bytes) noexcept;
  void record(const CommOptions& options, const std::string& what, Activity activity, Lane lane, std::int64_t begin_ns,
              std::int64_t end_ns, std::int64_t bytes) noexcept;

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<FlightLog> log_;  // null: one rank alone, which waits for nobody
  std::atomic<Timeline*> timeline_{nullptr};
  std::array<std::atomic<std::int64_t>, kPurposes> bytes_sent_{};
  DeviceLanes lanes_;
  StagingBuffer staging_;  // of the collective that is being carried out

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<CollectiveState>> queue_;
  std::deque<std::shared_ptr<PostedMessage>> ready_;  // messages for the progress thread
  std::uint64_t issued_ = 0;                          // collectives
  int background_ = 0;                                // operations in queue_ that the progress thread must reach
  CollectiveState* running_ = nullptr;
  std::string dropped_;  // not empty: the communicator is unusable
  std::atomic<bool> cancel_running_{false};
  std::optional<MessageStager> stager_;  // from the first message on device memory that needs it
  std::jthread progress_thread_;
};

}  // namespace tandem

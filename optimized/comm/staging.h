// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "optimized/comm/group.h"

namespace tandem {

// Operations on device memory over groups that reach only the host's: each works on copies in the host's memory, read from the
// device before and written back after.

/// Host memory for the copies of one collective after the other.
class StagingBuffer {
 public:
  /// Contents undefined; until the next call.
  [[nodiscard]] std::span<std::byte> bytes(std::size_t size);

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::size_t size_ = 0;
};

/// Group::run() of a call on device memory, complete when the result is back on the device. Buffers that lie within each other do
/// so in the copies.
[[nodiscard]] std::int64_t run_staged(Group& group, const Call& call, bool foreground, const std::atomic<bool>& cancelled,
                                      PhaseTimes* times, StagingBuffer& staging);

/// A message whose bytes lie in a device's memory, or that was sent after such a one.
class StagedMessage final : public PostedMessage {
 public:
  StagedMessage(std::shared_ptr<Group> group, MessageCall call);

  /// Hands it to the group; a send when its bytes are there, for which it blocks.
  void post() noexcept;
  /// Instead of post(): wait() throws.
  void fail(std::exception_ptr error) noexcept;

  [[nodiscard]] bool done() const noexcept override;
  void advance() noexcept override;
  MessageTimes wait() override;
  void cancel() noexcept override;

 private:
  enum class Phase : std::uint8_t { queued, reading, posted, failed };
  void settle(Phase phase) noexcept;
  void write_back() const;

  const std::shared_ptr<Group> group_;
  std::unique_ptr<std::byte[]> copy_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Phase phase_ = Phase::queued;
  std::shared_ptr<PostedMessage> inner_;  // of the copy; from when it is posted on
  mutable std::exception_ptr error_;
  mutable bool written_back_ = false;
};

/// Posts the messages of one endpoint. A send has to wait for its device first, and does so on a thread of the stager's own;
/// sends that follow keep their order behind it. Used by the endpoint's rank.
class MessageStager {
 public:
  explicit MessageStager(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  MessageStager(const MessageStager&) = delete;
  MessageStager& operator=(const MessageStager&) = delete;
  ~MessageStager() { close(); }

  /// Group::post().
  [[nodiscard]] Group::Posted post(MessageCall call);
  /// What has not been posted fails.
  void close() noexcept;

 private:
  void run(const std::stop_token& stop);

  const std::shared_ptr<Group> group_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::shared_ptr<StagedMessage>> queue_;  // the first of them may be on its way
  std::jthread thread_;                               // starts with the first send that needs it
};

}  // namespace tandem

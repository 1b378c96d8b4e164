// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "optimized/comm/message.h"
#include "optimized/comm/parking.h"
#include "optimized/comm/world_state.h"

namespace tandem {

class Mailbox;

/// One end of a message between two threads.
class MailboxMessage final : public PostedMessage, public std::enable_shared_from_this<MailboxMessage> {
 public:
  enum class Phase : std::uint8_t {
    posted,   ///< the other end has not come
    matched,  ///< both have; nobody copies yet
    copying,
    done,  ///< or failed: `mismatch_` is set
  };

  MailboxMessage(Mailbox& mailbox, MessageCall call) : PostedMessage(std::move(call)), mailbox_(mailbox) {}

  [[nodiscard]] bool done() const noexcept override { return phase_.load() == Phase::done; }
  void advance() noexcept override;
  MessageTimes wait() override;
  void cancel() noexcept override;

 private:
  friend class Mailbox;
  Mailbox& mailbox_;
  // Guarded by the mailbox; `phase_` may be looked at by anybody.
  std::atomic<Phase> phase_{Phase::posted};
  std::shared_ptr<MailboxMessage> other_;  // while matched and copying
  std::string mismatch_;                   // not empty: the two ends do not agree, and nothing was copied
  std::exception_ptr error_;               // the device's, while it copied
  std::int64_t copy_begin_ns_ = 0;
  std::int64_t copy_end_ns_ = 0;
};

/// Pairs the sends and receives of a group. The n-th send of rank a to rank b belongs to the n-th receive of b from a. Once both
/// are posted anyone may carry the pair out; the bytes go straight from buffer to buffer, in a device's memory by the receive's
/// lane.
class Mailbox {
 public:
  using Entry = std::shared_ptr<MailboxMessage>;

  Mailbox(WorldState& world, const std::vector<int>& members);

  /// Returns true when the other end was there already, so that the pair can be carried out.
  [[nodiscard]] bool post(const Entry& message);
  /// Copies the pair that `message` is part of, unless somebody else does. True: done by this call.
  bool try_copy(const Entry& message);
  /// Blocks until the message is done, copying it where possible. Throws PeerError, TimeoutError, ContractError; then nobody
  /// touches the buffer any more. True: copied by this call.
  bool wait(const Entry& message);
  void cancel(const Entry& message) noexcept;
  void wake() noexcept;

 private:
  struct Channel {
    std::deque<Entry> sends, receives;  // at most one of them is not empty
  };

  [[nodiscard]] Channel& channel(const MessageCall& call) noexcept;
  [[nodiscard]] bool withdraw(const Entry& message);
  [[noreturn]] void give_up(const MailboxMessage& message, bool in_time);
  void check_pair(MailboxMessage& send, MailboxMessage& recv);
  void wait_until_copied(const MailboxMessage& message);

  WorldState& world_;
  const std::vector<int>& members_;
  std::mutex mutex_;
  std::vector<Channel> channels_;  // [from, to]
  Parking parking_;
};

}  // namespace tandem

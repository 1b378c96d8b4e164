// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "optimized/comm/communicator.h"
#include "optimized/comm/threads/parking.h"
#include "optimized/comm/threads/world.h"

namespace tandem {

/// One end of a point-to-point message: what a rank posted, and how far it is.
struct Message {
  enum class Direction : std::uint8_t { send, recv };
  enum class Phase : std::uint8_t {
    posted,   ///< the other end has not come
    matched,  ///< both have; nobody copies yet
    copying,
    done,  ///< or failed: `error` is set
  };
  Direction direction = Direction::send;
  int rank = 0;  ///< who posted it, in the group
  int peer = 0;
  std::byte* data = nullptr;
  std::int64_t elements = 0;
  DType dtype = DType::u8;
  Envelope envelope;
  CommOptions options;

  // Guarded by the mailbox; `phase` may be looked at by anybody.
  std::atomic<Phase> phase{Phase::posted};
  std::shared_ptr<Message> other;  ///< while matched and copying
  std::string mismatch;            ///< not empty: the two ends do not agree, and nothing was copied
  std::int64_t copy_begin_ns = 0;
  std::int64_t copy_end_ns = 0;
};

/// "send 'activations' of 100 fp32 from rank 0 to rank 2 (step 3, micro-batch 0, chunk 0, forward)"
[[nodiscard]] std::string describe(const Message& message, const std::vector<int>& members);

/// Pairs the sends and receives of a group. The n-th send of rank a to rank b belongs to the n-th receive of b from a. Once both
/// are posted anyone may carry the pair out; the bytes go straight from buffer to buffer.
class Mailbox {
 public:
  Mailbox(ThreadsWorld& world, const std::vector<int>& members);

  /// Returns true when the other end was there already, so that the pair can be carried out.
  [[nodiscard]] bool post(const std::shared_ptr<Message>& message);
  /// Copies the pair that `message` is part of, unless somebody else does. True: done by this call.
  bool try_copy(const std::shared_ptr<Message>& message);
  /// Blocks until the message is done, copying it where possible. Throws PeerError, TimeoutError, ContractError; then nobody
  /// touches the buffer any more. True: copied by this call.
  bool wait(const std::shared_ptr<Message>& message);
  /// Takes the message back or, where the other end is there, carries it out. Nobody touches the buffer afterwards.
  void cancel(const std::shared_ptr<Message>& message) noexcept;
  void wake() noexcept;

 private:
  struct Channel {
    std::deque<std::shared_ptr<Message>> sends, receives;  // at most one of them is not empty
  };

  [[nodiscard]] Channel& channel(const Message& message) noexcept;
  [[nodiscard]] bool withdraw(const std::shared_ptr<Message>& message);
  [[noreturn]] void give_up(const Message& message, bool in_time);
  void check_pair(Message& send, Message& recv);
  void wait_until_copied(const Message& message);

  ThreadsWorld& world_;
  const std::vector<int>& members_;
  std::mutex mutex_;
  std::vector<Channel> channels_;  // [from, to]
  Parking parking_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "optimized/comm/communicator.h"
#include "optimized/comm/device_use.h"

namespace tandem {

/// What one rank asks of a point-to-point message.
struct MessageCall {
  enum class Direction : std::uint8_t { send, recv };
  Direction direction = Direction::send;
  int rank = 0;  ///< who asks, in the group
  int peer = 0;
  std::byte* data = nullptr;
  std::int64_t elements = 0;
  DType dtype = DType::u8;
  Envelope envelope{};
  CommOptions options{};
  std::uint64_t ordinal = 0;  ///< among the messages of this direction between the two, from 1; counted by the flight log
  DeviceUse device{};         ///< empty: the bytes are the host's

  [[nodiscard]] bool sends() const noexcept { return direction == Direction::send; }
  [[nodiscard]] std::int64_t size_bytes() const noexcept {
    return elements * static_cast<std::int64_t>(tandem::size_bytes(dtype));
  }
};

/// "send 'activations' of 100 fp32 from rank 0 to rank 2 (step 3, micro-batch 0, chunk 0, forward)"; ranks of the world.
[[nodiscard]] std::string describe(const MessageCall& message, const std::vector<int>& members);

/// "message is not the expected one: send ... meets recv ...", whichever order the two are given in.
[[nodiscard]] std::string describe_mismatch(const MessageCall& one, const MessageCall& other, const std::vector<int>& members);

/// When the bytes of a message moved, for the timeline.
struct MessageTimes {
  bool moved_here = false;  ///< by the thread that waited, at the end of its wait
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

/// One end of a message under way.
class PostedMessage {
 public:
  explicit PostedMessage(MessageCall call) : call_(std::move(call)) {}
  PostedMessage(const PostedMessage&) = delete;
  PostedMessage& operator=(const PostedMessage&) = delete;
  virtual ~PostedMessage() = default;

  [[nodiscard]] const MessageCall& call() const noexcept { return call_; }
  [[nodiscard]] virtual bool done() const noexcept = 0;
  /// Carries the message out as far as that needs no waiting: for the progress thread.
  virtual void advance() noexcept = 0;
  /// Blocks until the message is done. Throws PeerError, TimeoutError, ContractError; then nobody touches the buffer any more.
  virtual MessageTimes wait() = 0;
  /// Takes the message back or, where the other end is there, carries it out. Nobody touches the buffer afterwards.
  virtual void cancel() noexcept = 0;

 protected:
  MessageCall call_;
};

}  // namespace tandem

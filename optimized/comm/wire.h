// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tandem {

/// A message that a rank has posted. The bytes belong to it until it is complete, cancelled, or destroyed (which cancels).
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// True: complete; a send's bytes may change, a receive's are there. Never blocks. Throws ContractError where the two ends
  /// disagree about the size or the mark.
  [[nodiscard]] virtual bool test() = 0;
  /// Blocks until complete; false: the deadline passed. Also returns (false) soon after the world has failed.
  [[nodiscard]] virtual bool wait(std::chrono::steady_clock::time_point deadline) = 0;
  /// On return nobody touches the bytes any more.
  virtual void cancel() noexcept = 0;
};

/// Even channels carry the messages of collectives, whose threads do nothing else meanwhile; odd ones carry messages between
/// which a rank may compute. Groups number their channels from 0 on, without gaps worth mentioning.
[[nodiscard]] constexpr bool is_collective_channel(std::uint32_t channel) noexcept { return channel % 2 == 0; }

/// Carries bytes between the ranks of one world; groups, messages and collectives are built on it (message_group.h). Any thread
/// of a rank may use it. The n-th send of rank a to b on a channel belongs to the n-th receive of b from a on it; messages on
/// different channels, or of different pairs of ranks, may overtake each other.
class Wire {
 public:
  virtual ~Wire() = default;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int ranks() const noexcept = 0;
  /// `mark` travels with the bytes and must be the receiver's: a digest of what the two ends mean by the message. `to` may be
  /// this rank.
  [[nodiscard]] virtual std::unique_ptr<Transfer> send(int to, std::uint32_t channel, std::uint64_t mark,
                                                       std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Transfer> receive(int from, std::uint32_t channel, std::uint64_t mark,
                                                          std::span<std::byte> bytes) = 0;
  /// The messages that follow on this channel of collectives are those of an operation that was issued at this time
  /// (Timeline::now_ns()): for wires that have an idea of time.
  virtual void begin_collective(std::uint32_t /*channel*/, std::int64_t /*issued_ns*/) {}
};

}  // namespace tandem

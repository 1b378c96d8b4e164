// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/pitfall.h"

namespace tandem {

/// What a collective algorithm sees of its group. Ranks are places in the group.
class Peers {
 public:
  using Ticket = std::int64_t;  ///< of a message that has been started

  virtual ~Peers() = default;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// Node of a member: ranks with the same number are near each other. Numbers ascend with the ranks from 0.
  [[nodiscard]] virtual int node(int rank) const noexcept = 0;

  /// Starts a message; its bytes are left alone until wait() of the ticket. Messages between two ranks keep their order.
  [[nodiscard]] virtual Ticket send(int to, std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual Ticket receive(int from, std::span<std::byte> bytes) = 0;
  /// Blocks until the message is complete. Throws PeerError, TimeoutError, ContractError.
  virtual void wait(Ticket ticket) = 0;

  /// Memory of at least so many bytes, aligned to 64, the same until the next call; kept from operation to operation.
  [[nodiscard]] virtual std::span<std::byte> scratch(std::int64_t bytes) = 0;

  /// Whether this fault is switched on, on every rank of the group.
  [[nodiscard]] virtual bool planted(Pitfall) const noexcept { return false; }
};

}  // namespace tandem

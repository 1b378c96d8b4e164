// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "optimized/collectives/peers.h"
#include "optimized/comm/call.h"
#include "optimized/comm/wire.h"

namespace tandem {

class MessageGroup;

/// The peers of a message group for one collective after the other. Not thread-safe: collectives of a group are carried out one
/// at a time.
class GroupPeers final : public Peers {
 public:
  /// Borrows the group, which owns this. `ranks_per_node` of the world: members are neighbours where the world's numbers are.
  GroupPeers(MessageGroup& group, Wire& wire, std::uint32_t channel, int ranks_per_node);

  /// From now on messages belong to this call; `mark` is the same on all ranks.
  void begin(const Call& call, std::uint64_t mark, const std::atomic<bool>& cancelled);
  /// Cancels what has not been waited for. Returns the bytes that were sent to others since begin().
  std::int64_t end() noexcept;

  [[nodiscard]] int rank() const noexcept override;
  [[nodiscard]] int size() const noexcept override;
  [[nodiscard]] int node(int rank) const noexcept override { return nodes_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] Ticket send(int to, std::span<const std::byte> bytes) override;
  [[nodiscard]] Ticket receive(int from, std::span<std::byte> bytes) override;
  void wait(Ticket ticket) override;
  [[nodiscard]] std::span<std::byte> scratch(std::int64_t bytes) override;
  [[nodiscard]] bool planted(Pitfall pitfall) const noexcept override;

 private:
  struct Started {
    std::unique_ptr<Transfer> transfer;
    int peer = 0;
  };
  [[nodiscard]] Ticket start(std::unique_ptr<Transfer> transfer, int peer);

  MessageGroup& group_;
  Wire& wire_;
  const std::uint32_t channel_;
  std::vector<int> nodes_;  // by rank
  const Call* call_ = nullptr;
  std::uint64_t mark_ = 0;
  const std::atomic<bool>* cancelled_ = nullptr;
  std::vector<Started> started_;  // by ticket
  std::int64_t bytes_sent_ = 0;
  std::vector<std::byte> scratch_;
};

}  // namespace tandem

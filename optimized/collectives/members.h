// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "optimized/collectives/peers.h"

namespace tandem::collectives {

/// Some ranks of a group, numbered by their place among them. This rank is one of them. Borrows the peers.
class Members {
 public:
  /// All of them.
  explicit Members(Peers& peers);
  Members(Peers& peers, std::vector<int> ranks);

  [[nodiscard]] int place() const noexcept { return place_; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(ranks_.size()); }
  /// Place `steps` further on, around the end.
  [[nodiscard]] int after(int steps) const noexcept { return wrapped(place_ + steps); }
  [[nodiscard]] int before(int steps) const noexcept { return wrapped(place_ - steps); }
  [[nodiscard]] int wrapped(int place) const noexcept { return ((place % size()) + size()) % size(); }
  /// An order in which to exchange something with every other place: in each turn, every place sends to one and receives from
  /// one, and where nodes are of equal size all do so within their node or all do not; other nodes first.
  struct Turn {
    int to, from;
  };
  [[nodiscard]] std::vector<Turn> turns() const;
  [[nodiscard]] Peers& peers() const noexcept { return *peers_; }

  /// As of Peers, but numbered by place; no bytes are no message.
  [[nodiscard]] Peers::Ticket send(int to, std::span<const std::byte> bytes) const;
  [[nodiscard]] Peers::Ticket receive(int from, std::span<std::byte> bytes) const;
  void wait(Peers::Ticket ticket) const;
  void wait(std::span<const Peers::Ticket> tickets) const;

 private:
  Peers* peers_;
  std::vector<int> ranks_;
  int place_;
};

}  // namespace tandem::collectives

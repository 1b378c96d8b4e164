// SPDX-License-Identifier: Apache-2.0
#include "optimized/collectives/members.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::collectives {
namespace {

constexpr Peers::Ticket kNoMessage = -1;

std::vector<int> all_ranks(const Peers& peers) {
  std::vector<int> ranks(static_cast<std::size_t>(peers.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Ranks of each node where all have equally many, otherwise all of them.
int ranks_per_node(const Peers& peers, const std::vector<int>& ranks) {
  std::vector<int> sizes;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 0 || peers.node(ranks[i]) != peers.node(ranks[i - 1])) sizes.push_back(0);
    ++sizes.back();
  }
  const bool even = std::ranges::all_of(sizes, [&](int size) { return size == sizes[0]; });
  return even ? sizes[0] : static_cast<int>(ranks.size());
}

}  // namespace

Members::Members(Peers& peers) : Members(peers, all_ranks(peers)) {}

Members::Members(Peers& peers, std::vector<int> ranks) : peers_(&peers), ranks_(std::move(ranks)) {
  const auto own = std::ranges::find(ranks_, peers.rank());
  TANDEM_CHECK(own != ranks_.end(), fmt::format("rank {} is not among the members", peers.rank()));
  place_ = static_cast<int>(own - ranks_.begin());
}

std::vector<Members::Turn> Members::turns() const {
  const int per_node = ranks_per_node(*peers_, ranks_);
  const int nodes = size() / per_node;
  const int node = place_ / per_node, seat = place_ % per_node;
  std::vector<Turn> turns;
  for (int farther = 1; farther <= nodes; ++farther) {
    for (int step = 0; step < per_node; ++step) {
      if (farther == nodes && step == 0) continue;
      turns.push_back({.to = (node + farther) % nodes * per_node + (seat + step) % per_node,
                       .from = (node + nodes - farther) % nodes * per_node + (seat + per_node - step) % per_node});
    }
  }
  return turns;
}

Peers::Ticket Members::send(int to, std::span<const std::byte> bytes) const {
  return bytes.empty() ? kNoMessage : peers_->send(ranks_[static_cast<std::size_t>(to)], bytes);
}

Peers::Ticket Members::receive(int from, std::span<std::byte> bytes) const {
  return bytes.empty() ? kNoMessage : peers_->receive(ranks_[static_cast<std::size_t>(from)], bytes);
}

void Members::wait(Peers::Ticket ticket) const {
  if (ticket != kNoMessage) peers_->wait(ticket);
}

void Members::wait(std::span<const Peers::Ticket> tickets) const {
  for (const Peers::Ticket ticket : tickets) wait(ticket);
}

}  // namespace tandem::collectives

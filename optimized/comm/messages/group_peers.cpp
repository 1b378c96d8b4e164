// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/group_peers.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/comm/messages/message_group.h"

namespace tandem {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// Members that follow each other on one node of the world share one; a node that comes back later counts as another.
std::vector<int> nodes_of(const std::vector<int>& members, int ranks_per_node) {
  std::vector<int> nodes(members.size());
  for (std::size_t i = 1; i < members.size(); ++i) {
    const bool is_near = members[i] / ranks_per_node == members[i - 1] / ranks_per_node;
    nodes[i] = nodes[i - 1] + (is_near ? 0 : 1);
  }
  return nodes;
}

}  // namespace

GroupPeers::GroupPeers(MessageGroup& group, Wire& wire, std::uint32_t channel, int ranks_per_node)
    : group_(group), wire_(wire), channel_(channel), nodes_(nodes_of(group.members(), ranks_per_node)) {}

void GroupPeers::begin(const Call& call, std::uint64_t mark, const std::atomic<bool>& cancelled) {
  call_ = &call;
  mark_ = mark;
  cancelled_ = &cancelled;
  bytes_sent_ = 0;
  started_.clear();
}

std::int64_t GroupPeers::end() noexcept {
  started_.clear();
  call_ = nullptr;
  return bytes_sent_;
}

int GroupPeers::rank() const noexcept { return group_.rank(); }
int GroupPeers::size() const noexcept { return group_.size(); }
bool GroupPeers::planted(Pitfall pitfall) const noexcept { return group_.world().pitfalls().on(pitfall); }

Peers::Ticket GroupPeers::start(std::unique_ptr<Transfer> transfer, int peer) {
  started_.push_back({std::move(transfer), peer});
  return std::ssize(started_) - 1;
}

Peers::Ticket GroupPeers::send(int to, std::span<const std::byte> bytes) {
  if (to != rank()) bytes_sent_ += std::ssize(bytes);
  return start(wire_.send(group_.members()[at(to)], channel_, mark_, bytes), to);
}

Peers::Ticket GroupPeers::receive(int from, std::span<std::byte> bytes) {
  return start(wire_.receive(group_.members()[at(from)], channel_, mark_, bytes), from);
}

void GroupPeers::wait(Ticket ticket) {
  TANDEM_CHECK(ticket >= 0 && ticket < std::ssize(started_), fmt::format("ticket {} of {}", ticket, started_.size()));
  Started& started = started_[static_cast<std::size_t>(ticket)];
  if (!started.transfer) return;
  try {
    group_.wait_for(*started.transfer, {.peer = started.peer, .call = call_, .cancelled = cancelled_});
  } catch (...) {
    started_.clear();  // before the buffers of whoever called go away
    throw;
  }
  started.transfer.reset();
}

std::span<std::byte> GroupPeers::scratch(std::int64_t bytes) {
  const auto needed = static_cast<std::size_t>(bytes);
  if (scratch_.size() < needed + kAlignment) scratch_ = std::vector<std::byte>(needed + kAlignment);
  void* begin = scratch_.data();
  std::size_t space = scratch_.size();
  TANDEM_CHECK(std::align(kAlignment, needed, begin, space) != nullptr);
  return {static_cast<std::byte*>(begin), needed};
}

}  // namespace tandem

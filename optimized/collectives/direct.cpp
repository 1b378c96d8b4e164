// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "kernels/cpu/sum_in_order.h"
#include "optimized/collectives/families.h"

namespace tandem::collectives {
namespace {

// Slot of a source in the scratch of direct_reduce_scatter.
Bytes slot_of(Bytes scratch, int place, std::size_t bytes) {
  return scratch.subspan(static_cast<std::size_t>(place) * bytes, bytes);
}

}  // namespace

std::int64_t direct_scratch_bytes(const Members& members, const Parts& parts) {
  return parts.bytes(members.place(), members.place() + 1) * members.size();
}

void direct_reduce_scatter(const Members& members, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch) {
  std::vector<Peers::Ticket> tickets;
  std::vector<const std::byte*> sources(static_cast<std::size_t>(members.size()));
  sources[static_cast<std::size_t>(members.place())] = parts.of(input, members.place()).data();
  for (const auto [to, from] : members.turns()) {
    const Bytes slot = slot_of(scratch, from, output.size());
    sources[static_cast<std::size_t>(from)] = slot.data();
    tickets.push_back(members.receive(from, slot));
    tickets.push_back(members.send(to, parts.of(input, to)));
  }
  members.wait(tickets);
  std::byte* const destination = output.data();
  sum_in_order(parts.dtype(), sources, std::span(&destination, 1), parts.elements(members.place()));
}

void direct_all_gather(const Members& members, const Parts& parts, ConstBytes input, Bytes output) {
  std::vector<Peers::Ticket> tickets;
  for (const auto [to, from] : members.turns()) {
    tickets.push_back(members.receive(from, parts.of(output, from)));
    tickets.push_back(members.send(to, input));
  }
  copy_bytes(input, parts.of(output, members.place()));
  members.wait(tickets);
}

void direct_all_to_all(const Members& members, const Parts& sent, ConstBytes input, const Parts& received, Bytes output) {
  std::vector<Peers::Ticket> tickets;
  for (const auto [to, from] : members.turns()) {
    tickets.push_back(members.receive(from, received.of(output, from)));
    tickets.push_back(members.send(to, sent.of(input, to)));
  }
  copy_bytes(sent.of(input, members.place()), received.of(output, members.place()));
  members.wait(tickets);
}

void direct_broadcast(const Members& members, Bytes data, int root) {
  if (members.place() != root) return members.wait(members.receive(root, data));
  std::vector<Peers::Ticket> tickets;
  for (const auto [to, from] : members.turns()) tickets.push_back(members.send(to, data));
  members.wait(tickets);
}

void direct_gather(const Members& members, const Parts& parts, ConstBytes input, Bytes output, int root) {
  if (members.place() != root) return members.wait(members.send(root, input));
  std::vector<Peers::Ticket> tickets;
  for (const auto [to, from] : members.turns()) tickets.push_back(members.receive(from, parts.of(output, from)));
  copy_bytes(input, parts.of(output, root));
  members.wait(tickets);
}

void direct_scatter(const Members& members, const Parts& parts, ConstBytes input, Bytes output, int root) {
  if (members.place() != root) return members.wait(members.receive(root, output));
  std::vector<Peers::Ticket> tickets;
  for (const auto [to, from] : members.turns()) tickets.push_back(members.send(to, parts.of(input, to)));
  copy_bytes(parts.of(input, root), output);
  members.wait(tickets);
}

}  // namespace tandem::collectives

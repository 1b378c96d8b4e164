// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <vector>

#include "optimized/collectives/families.h"

namespace tandem::collectives {

// Place v hands its sum to v without its lowest bit, after it has that of v + 1, v + 2, v + 4, ... below that bit.
void tree_reduce(const Members& members, DType dtype, Bytes data, Bytes scratch) {
  const Bytes received = scratch.first(data.size());
  for (int bit = 1; bit < members.size(); bit *= 2) {
    if ((members.place() & bit) != 0) return members.wait(members.send(members.place() - bit, data));
    if (members.place() + bit >= members.size()) continue;
    members.wait(members.receive(members.place() + bit, received));
    add(dtype, data, received, data);
  }
}

// The same tree with the root at 0, farthest place first: its part of the tree is the deepest.
void tree_broadcast(const Members& members, Bytes data, int root) {
  const int size = members.size();
  const int own = members.wrapped(members.place() - root);
  const auto below = own == 0 ? std::bit_ceil(static_cast<unsigned>(size)) : static_cast<unsigned>(own & -own);
  if (own != 0) members.wait(members.receive(members.wrapped(own - static_cast<int>(below) + root), data));
  std::vector<Peers::Ticket> sends;
  for (int bit = static_cast<int>(below / 2); bit > 0; bit /= 2) {
    if (own + bit < size) sends.push_back(members.send(members.wrapped(own + bit + root), data));
  }
  members.wait(sends);
}

}  // namespace tandem::collectives

// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <vector>

#include "optimized/collectives/families.h"

namespace tandem::collectives {
namespace {

// As many places as the largest power of two not above their number carry the exchange out. The first 2 * pairs places form
// pairs, of which the even place takes part for both.
struct Core {
  explicit Core(const Members& members)
      : size(static_cast<int>(std::bit_floor(static_cast<unsigned>(members.size())))), pairs(members.size() - size) {
    const int place = members.place();
    in_pair = place < 2 * pairs;
    takes_part = !in_pair || place % 2 == 0;
    partner = in_pair ? place ^ 1 : place;
    index = in_pair ? place / 2 : place - pairs;
  }
  [[nodiscard]] int place_of(int core_index) const { return core_index < pairs ? 2 * core_index : core_index + pairs; }
  // How many places' parts each member of the core stands for.
  [[nodiscard]] std::vector<int> block_sizes() const {
    std::vector<int> sizes(static_cast<std::size_t>(size), 1);
    for (int i = 0; i < pairs; ++i) sizes[static_cast<std::size_t>(i)] = 2;
    return sizes;
  }

  int size, pairs;
  bool in_pair, takes_part;
  int partner, index;
};

// Afterwards `partial` holds the sum of this index's block, one block per member of the core. source: what this rank adds; may be
// partial itself. received: memory for one half.
void halve(const Members& members, const Core& core, const Parts& blocks, ConstBytes source, Bytes partial, Bytes received) {
  int first = 0;
  for (int half = core.size / 2; half > 0; half /= 2) {
    const bool lower = core.index < first + half;
    const int peer = core.place_of(lower ? core.index + half : core.index - half);
    const int keep = lower ? first : first + half;
    const int give = lower ? first + half : first;
    const Bytes incoming = received.first(static_cast<std::size_t>(blocks.bytes(keep, keep + half)));
    const Peers::Ticket receive = members.receive(peer, incoming);
    const Peers::Ticket send = members.send(peer, blocks.of(source, give, give + half));
    members.wait(receive);
    const ConstBytes own = blocks.of(source, keep, keep + half);
    const Bytes sum = blocks.of(partial, keep, keep + half);
    lower ? add(blocks.dtype(), own, incoming, sum) : add(blocks.dtype(), incoming, own, sum);
    members.wait(send);
    source = partial;
    first = keep;
  }
}

// Every block to every member of the core; this index's lies in `data`.
void double_up(const Members& members, const Core& core, const Parts& blocks, Bytes data) {
  for (int half = 1; half < core.size; half *= 2) {
    const int own = core.index / half * half;
    const int other = own ^ half;
    const int peer = core.place_of(core.index ^ half);
    const Peers::Ticket receive = members.receive(peer, blocks.of(data, other, other + half));
    const Peers::Ticket send = members.send(peer, blocks.of(data, own, own + half));
    members.wait(receive);
    members.wait(send);
  }
}

}  // namespace

void recursive_all_reduce(const Members& members, DType dtype, Bytes data, Bytes scratch) {
  const Core core(members);
  if (!core.takes_part) {
    members.wait(members.send(core.partner, data));
    return members.wait(members.receive(core.partner, data));
  }
  if (core.in_pair) {
    const Bytes received = scratch.first(data.size());
    members.wait(members.receive(core.partner, received));
    add(dtype, data, received, data);
  }
  const auto elements = static_cast<std::int64_t>(data.size() / size_bytes(dtype));
  const Parts blocks = Parts::even(elements, core.size, dtype);
  halve(members, core, blocks, data, data, scratch);
  double_up(members, core, blocks, data);
  if (core.in_pair) members.wait(members.send(core.partner, data));
}

void recursive_reduce_scatter(const Members& members, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch) {
  if (members.size() == 1) return copy_bytes(input, output);
  const Core core(members);
  if (!core.takes_part) {
    members.wait(members.send(core.partner, input));
    return members.wait(members.receive(core.partner, output));
  }
  const Bytes partial = scratch.first(input.size());
  const Bytes received = scratch.subspan(input.size());
  ConstBytes source = input;
  if (core.in_pair) {
    const Bytes of_partner = received.first(input.size());
    members.wait(members.receive(core.partner, of_partner));
    add(parts.dtype(), input, of_partner, partial);
    source = partial;
  }
  halve(members, core, parts.grouped(core.block_sizes()), source, partial, received);
  const Peers::Ticket send = core.in_pair ? members.send(core.partner, parts.of(partial, core.partner)) : members.send(0, {});
  copy_bytes(parts.of(partial, members.place()), output);
  members.wait(send);
}

void recursive_all_gather(const Members& members, const Parts& parts, ConstBytes input, Bytes output) {
  const Core core(members);
  const int place = members.place();
  copy_bytes(input, parts.of(output, place));
  // The partner lacks all but its own part, which lies between two ranges.
  const int missing = core.takes_part ? core.partner : place;
  const Bytes before = parts.of(output, 0, missing);
  const Bytes after = parts.of(output, missing + 1, parts.size());
  if (!core.takes_part) {
    const Peers::Ticket send = members.send(core.partner, parts.of(output, place));
    const Peers::Ticket receives[] = {members.receive(core.partner, before), members.receive(core.partner, after)};
    members.wait(send);
    return members.wait(receives);
  }
  if (core.in_pair) members.wait(members.receive(core.partner, parts.of(output, core.partner)));
  double_up(members, core, parts.grouped(core.block_sizes()), output);
  if (!core.in_pair) return;
  const Peers::Ticket sends[] = {members.send(core.partner, before), members.send(core.partner, after)};
  members.wait(sends);
}

}  // namespace tandem::collectives

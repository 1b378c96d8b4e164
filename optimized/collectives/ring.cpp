// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "optimized/collectives/families.h"

namespace tandem::collectives {
namespace {

// What step `step` of ring_all_gather() passes on. A step that is off by one would send again what it sent before, as many bytes
// as the receiver expects.
ConstBytes to_pass_on(const Members& members, const Parts& parts, ConstBytes output, int step) {
  const ConstBytes right = parts.of(output, members.before(step));
  if (step == 0 || !members.peers().planted(Pitfall::ring_step_off_by_one)) return right;
  const auto wrong_begin = static_cast<std::size_t>(parts.of(output, members.before(step - 1)).data() - output.data());
  return output.subspan(std::min(wrong_begin, output.size() - right.size()), right.size());
}

}  // namespace

// The partial sum of part p starts at the place after p and ends at p. Sends are not waited for before the end: a
// slow link holds nobody back who does not need what goes over it.
void ring_reduce_scatter(const Members& members, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch) {
  const int steps = members.size() - 1;
  if (steps == 0) return copy_bytes(input, output);
  std::vector<Peers::Ticket> receives, sends;
  for (int step = 0; step < steps; ++step) {
    receives.push_back(members.receive(members.before(1), parts.of(scratch, members.before(step + 2))));
  }
  sends.push_back(members.send(members.after(1), parts.of(input, members.before(1))));
  for (int step = 0; step < steps; ++step) {
    const int part = members.before(step + 2);
    const Bytes partial = parts.of(scratch, part);
    members.wait(receives[static_cast<std::size_t>(step)]);
    if (part == members.place()) {
      add(parts.dtype(), partial, parts.of(input, part), output);
    } else {
      add(parts.dtype(), partial, parts.of(input, part), partial);
      sends.push_back(members.send(members.after(1), partial));
    }
  }
  members.wait(sends);
}

void ring_all_gather(const Members& members, const Parts& parts, ConstBytes input, Bytes output) {
  const int steps = members.size() - 1;
  std::vector<Peers::Ticket> receives, sends;
  for (int step = 0; step < steps; ++step) {
    receives.push_back(members.receive(members.before(1), parts.of(output, members.before(step + 1))));
  }
  copy_bytes(input, parts.of(output, members.place()));
  for (int step = 0; step < steps; ++step) {
    sends.push_back(members.send(members.after(1), to_pass_on(members, parts, output, step)));
    members.wait(receives[static_cast<std::size_t>(step)]);
  }
  members.wait(sends);
}

void ring_all_reduce(const Members& members, DType dtype, Bytes data, Bytes scratch) {
  const auto elements = static_cast<std::int64_t>(data.size() / size_bytes(dtype));
  const Parts parts = Parts::even(elements, members.size(), dtype);
  const Bytes own = parts.of(data, members.place());
  ring_reduce_scatter(members, parts, data, own, scratch);
  ring_all_gather(members, parts, own, data);
}

void ring_broadcast(const Members& members, Bytes data, int root) {
  const Parts parts = Parts::even(static_cast<std::int64_t>(data.size()), members.size(), DType::u8);
  const Bytes own = parts.of(data, members.place());
  direct_scatter(members, parts, data, own, root);
  ring_all_gather(members, parts, own, data);
}

}  // namespace tandem::collectives

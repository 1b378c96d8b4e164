// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/graph_segments.h"

#include <algorithm>
#include <array>
#include <bit>
#include <span>

#include "core/io/hash.h"

namespace tandem {
namespace {

bool is_local(const Operation& op) {
  return op.kind == OpKind::compute || op.kind == OpKind::allocate || op.kind == OpKind::free;
}

bool goes_on(const Operation& last, const Operation& next) {
  const bool was_forward = last.phase == Phase::forward, is_forward = next.phase == Phase::forward;
  return last.micro_batch == next.micro_batch && last.chunk == next.chunk && was_forward == is_forward;
}

bool waits(const StepProgram& program, const Operation& op) {
  return std::ranges::any_of(op.after, [&](OperationId id) { return program[static_cast<std::size_t>(id)].background; });
}

// Of what is computed: where it lies may be another place each time.
std::uint64_t mix(std::uint64_t seed, const Operation& op) {
  const std::array<std::int64_t, 6> fields = {
      static_cast<std::int64_t>(op.phase),  static_cast<std::int64_t>(op.part), op.layer, op.chunk, op.piece,
      std::bit_cast<std::int64_t>(op.flops)};
  return hash64(std::as_bytes(std::span(fields)), seed);
}

}  // namespace

std::vector<GraphSegment> graph_segments(const StepProgram& program, int least_computes) {
  std::vector<GraphSegment> segments;
  GraphSegment open;
  int computes = 0;
  const Operation* last = nullptr;  // that computes, of the open segment
  const auto close = [&](OperationId end) {
    open.end = end;
    if (computes >= least_computes) segments.push_back(open);
    open = {.begin = end};
    computes = 0;
    last = nullptr;
  };
  for (OperationId id = 0; id < std::ssize(program); ++id) {
    const Operation& op = program[static_cast<std::size_t>(id)];
    if (!is_local(op)) {
      close(id);
      open.begin = id + 1;
      continue;
    }
    const bool is_work = op.kind == OpKind::compute;
    if (waits(program, op) || (is_work && last != nullptr && !goes_on(*last, op))) close(id);
    if (!is_work) continue;
    open.key = mix(open.key, op);
    last = &op;
    computes += op.flops > 0 ? 1 : 0;
  }
  close(static_cast<OperationId>(program.size()));
  return segments;
}

}  // namespace tandem

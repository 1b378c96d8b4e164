// SPDX-License-Identifier: Apache-2.0
// What orders the operations of a rank, and what they read and add to.
#include <algorithm>

#include <fmt/format.h>

#include "core/step_program_check.h"

namespace tandem::step_program_check {

Sources reads(const Operation& op) {
  if (op.phase == Phase::backward_weight) return {};
  const auto in_forward = [&](int source) { return op.phase == Phase::forward ? Sources{source} : Sources{}; };
  switch (op.part) {
    case Part::embedding_lookup: return in_forward(kEmbeddingSource);
    case Part::embedding: return in_forward(kPositionSource);
    case Part::head_logits:
    case Part::head_loss: return in_forward(kHeadSource);
    case Part::head_norm: return {kFinalNormSource};
    case Part::attention_core:
    case Part::dispatch:
    case Part::block:
    case Part::message: return {};
    default: return {op.layer};
  }
}

Sources adds(const Operation& op) {
  if (op.part == Part::head_loss && op.phase == Phase::forward) return {kHeadSource};
  if (op.phase != Phase::backward_weight) return {};
  switch (op.part) {
    case Part::embedding_lookup: return {kEmbeddingSource};
    case Part::embedding: return {kEmbeddingSource, kPositionSource};
    case Part::head_norm: return {kFinalNormSource};
    case Part::block: return {op.layer};
    default: return {};
  }
}

bool waits_for(const StepProgram& program, int later, int earlier) {
  std::vector<bool> seen(static_cast<std::size_t>(std::max(0, later - earlier)), false);
  std::vector<int> open = {later};
  while (!open.empty()) {
    const int index = open.back();
    open.pop_back();
    for (const OperationId before : program[static_cast<std::size_t>(index)].after) {
      if (before == earlier) return true;
      // What lies before `earlier` cannot wait for it.
      if (before < earlier || before >= index || seen[static_cast<std::size_t>(before - earlier)]) continue;
      seen[static_cast<std::size_t>(before - earlier)] = true;
      open.push_back(before);
    }
  }
  return false;
}

std::vector<bool> all_before(const StepProgram& program, int index) {
  std::vector<bool> seen(program.size(), false);
  std::vector<int> open = {index};
  while (!open.empty()) {
    const int at = open.back();
    open.pop_back();
    for (const OperationId before : program[static_cast<std::size_t>(at)].after) {
      if (before < 0 || before >= at || seen[static_cast<std::size_t>(before)]) continue;
      seen[static_cast<std::size_t>(before)] = true;
      open.push_back(before);
    }
  }
  return seen;
}

void check_background(const StepProgram& program, int rank, Problems& problems) {
  std::vector<bool> named(program.size(), false);
  for (int i = 0; i < std::ssize(program); ++i) {
    for (const OperationId before : program[static_cast<std::size_t>(i)].after) {
      if (before >= 0 && before < i) named[static_cast<std::size_t>(before)] = true;
    }
  }
  for (std::size_t i = 0; i < program.size(); ++i) {
    const Operation& op = program[i];
    if (!op.background) continue;
    const bool collective =
        op.kind == OpKind::communicate && op.collective != Collective::send && op.collective != Collective::recv;
    if (!collective) {
      problems.push_back(fmt::format("rank {}: {} is in the background, where only collectives can be", rank, to_string(op)));
    } else if (!named[i]) {
      problems.push_back(fmt::format("rank {}: nobody waits for {}, which is in the background", rank, to_string(op)));
    }
  }
}

}  // namespace tandem::step_program_check

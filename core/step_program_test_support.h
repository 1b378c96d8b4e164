// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "core/pipeline_layout.h"
#include "core/process_grid.h"
#include "core/step_program.h"

namespace tandem::step_program_test {

/// Small programs made by hand, all forwards before all backwards, that check_programs() must accept.
struct WorldShape {
  ParallelDegrees degrees = {};
  int chunks = 1;
  int layers = 4;
  int micro_batches = 2;
  bool experts = false;
  bool v_shaped = false;
  int head_pieces = 2;
};

inline constexpr std::int64_t kBlockBytes = 100;
inline constexpr std::int64_t kGradientBytes = 1000;  // of each bucket
inline constexpr std::int64_t kMessageBytes = 64;
inline constexpr std::int64_t kNormBytes = 8;

/// The programs of all ranks with what is expected of them.
struct World {
  std::vector<StepProgram> programs;
  ProgramExpectation expectation;
};

[[nodiscard]] World make_world(const WorldShape& shape);

using Wanted = std::function<bool(const Operation&)>;
/// Index of the first operation that is wanted; the test fails where there is none.
[[nodiscard]] int find_operation(const StepProgram& program, const Wanted& wanted);
[[nodiscard]] Wanted is_compute(Phase phase, Part part, int layer, int micro_batch, int piece = 0);
[[nodiscard]] Wanted is_message(Collective collective, Phase phase, int micro_batch);
[[nodiscard]] Wanted is_bucket(int bucket);
[[nodiscard]] Wanted is_kind(OpKind kind);

/// Takes an operation out; dependencies on it vanish, the others are renumbered.
void erase_operation(StepProgram& program, int index);
/// Puts an operation where `to` (counted after it is taken out) is.
void move_operation(StepProgram& program, int from, int to);

[[nodiscard]] std::string all_problems(const World& world);

}  // namespace tandem::step_program_test

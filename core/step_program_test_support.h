// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

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

inline constexpr std::int64_t kParameterBytes = 500;  // of each bucket
/// The same with ZeRO. Buckets of a rank, those that it has: for each layer, last first, its experts and its dense parameters,
/// then final norm, position embedding, token embedding (tied to the head). Every operation waits for the one before it.
[[nodiscard]] World make_zero_world(const WorldShape& shape, int stage);
/// Makes every operation wait for the one before it, as in make_zero_world.
void chain(StepProgram& program);
/// The same, stage 0 too, with every gradient bucket reduced in the background right behind the last operation that adds to it
/// and, in stage 3, parameters gathered in the background. Freed gradients are freed late.
[[nodiscard]] World make_overlapped_world(const WorldShape& shape, int stage);
/// Makes every operation wait for the last one before it that is not in the background, and those that need what goes on there
/// for it: the free of gradients or else the norm for a reduction, the first reader for a gather.
void chain_overlapped(StepProgram& program, const RankExpectation& expected);

using Wanted = std::function<bool(const Operation&)>;
/// Index of the first operation that is wanted; the test fails where there is none.
[[nodiscard]] int find_operation(const StepProgram& program, const Wanted& wanted);
[[nodiscard]] Operation& the(StepProgram& program, const Wanted& wanted);
[[nodiscard]] Wanted is_compute(Phase phase, Part part, int layer, int micro_batch, int piece = 0);
[[nodiscard]] Wanted is_message(Collective collective, Phase phase, int micro_batch);
[[nodiscard]] Wanted is_bucket(int bucket);
[[nodiscard]] Wanted is_kind(OpKind kind);
[[nodiscard]] Wanted is_of_bucket(OpKind kind, MemoryCategory category, int bucket, int micro_batch);

/// Takes an operation out; dependencies on it vanish, the others are renumbered.
void erase_operation(StepProgram& program, int index);
/// Puts an operation where `to` (counted after it is taken out) is.
void move_operation(StepProgram& program, int from, int to);

/// Of programs in a chain, which they stay. erase_everywhere makes the same mistake on every rank, so that the ranks still meet.
void erase_everywhere(World& world, const Wanted& wanted);
void move_before(StepProgram& program, const Wanted& moved, const Wanted& wanted);
void move_behind(StepProgram& program, const Wanted& moved, const Wanted& wanted);

[[nodiscard]] std::string all_problems(const World& world);
/// Whether `text` is among them.
[[nodiscard]] testing::AssertionResult reports(const World& world, const std::string& text);

/// For make_zero_world: buckets 0..3 are layers 3..0, then these.
inline const WorldShape kTwoReplicas{.degrees = {.data = 2}};
inline constexpr int kFinalNorm = 4, kPositions = 5, kTable = 6;

inline constexpr auto kGradients = MemoryCategory::gradients;
inline constexpr auto kParameters = MemoryCategory::parameters;

/// A world under a stage of ZeRO.
struct StagedShape {
  WorldShape shape;
  int stage;
};

}  // namespace tandem::step_program_test

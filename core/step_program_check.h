// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/step_program.h"

/// The parts of check_programs() (core/step_program.h, which says what each proves). They add what they find to `problems`, with
/// the rank in front.
namespace tandem::step_program_check {

using Problems = std::vector<std::string>;

/// A part that runs in a chunk.
struct Step {
  Part part;
  int layer = -1;
  int piece = 0;
  bool summed_later = false;  ///< its result is taken up with those of the other pieces
};
/// Of a block, in their order; phase forward or backward_input.
[[nodiscard]] std::vector<Step> block_steps(const RankExpectation& expectation, int layer, Phase phase, int micro_batch);

/// Stages of the pipeline that each rank belongs to.
class StageMap {
 public:
  explicit StageMap(const ProgramExpectation& expectation) : expectation_(expectation) {}
  [[nodiscard]] int stages(int rank) const;
  [[nodiscard]] int stage_of(int rank, int chunk) const;
  /// Of the pipeline group of `rank`; -1 where none holds the stage.
  [[nodiscard]] int holder(int rank, int stage) const;

 private:
  const ProgramExpectation& expectation_;
};

/// Whether operation `later` waits for `earlier` by its declared dependencies, directly or through others. That a rank comes to
/// `later` after it has issued `earlier` orders nothing where that one is in the background.
[[nodiscard]] bool waits_for(const StepProgram& program, int later, int earlier);
/// [operations] everything that one operation waits for.
[[nodiscard]] std::vector<bool> all_before(const StepProgram& program, int index);

/// Where an operation reads parameters or adds to gradients, as RankExpectation::bucket_sources counts.
using Sources = std::vector<int>;
[[nodiscard]] Sources reads(const Operation& op);
[[nodiscard]] Sources adds(const Operation& op);

/// Dependencies, and what is computed, received and sent for each chunk and micro-batch.
void check_work(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems);

/// What may be in the background, and whether somebody waits for it.
void check_background(const StepProgram& program, int rank, Problems& problems);

/// Gradient sums of the whole step, norm and optimizer.
void check_gradients(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems);

/// With ZeRO: the gradients and parameters of buckets whose ranks keep parts.
void check_zero(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems);

struct MemoryFacts {  ///< of one rank: bytes allocated and not yet freed; micro-batches whose backward is still to come
  std::int64_t peak_bytes = 0;
  BytesByCategory peak_bytes_by_category{};
  int peak_in_flight = 0;
};
[[nodiscard]] MemoryFacts check_memory(const StepProgram& program, int rank, Problems& problems);

/// Whether the communication of all ranks together ends, and who is stuck at what where it does not.
void check_communication(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation, Problems& problems);

}  // namespace tandem::step_program_check

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "optimized/checkpoint/checkpointer.h"
#include "reference/checkpoint.h"
#include "suites/pair.h"

namespace tandem {

/// Training steps of the engine with checkpoints beside them. Ranks are threads whatever the transport: files and records are in
/// one folder and one process.
struct CheckpointScript {
  PairInputs inputs;  ///< `steps`: where the run ends, and the length of its schedule
  std::int64_t first_step = 0;
  std::int64_t end = -1;            ///< steps done at the end; -1: inputs.steps
  std::filesystem::path load = {};  ///< empty: from the start
  bool verifies = true;             ///< false: `load` is a step folder that is loaded without a look at its hashes
  CheckpointerOptions checkpoints = {};
  std::set<std::int64_t> saved_after = {};     ///< steps done; 0 saves before the first
  std::set<std::int64_t> settled_before = {};  ///< of saved_after: nothing is under way when they begin
  std::set<std::int64_t> recorded_after = {};  ///< whole states without a checkpoint; those of saved_after come by themselves
  /// On every rank: around save(), and when a step is done (after poll()).
  std::function<void(int rank, std::int64_t steps_done)> before_save = {};
  std::function<void(int rank, std::int64_t steps_done)> after_save = {};
  std::function<void(int rank, std::int64_t steps_done, const Checkpointer&)> after_step = {};
  std::function<void(int rank, const Checkpointer&)> after_finish = {};
  /// The engine's gate (optimized/engine/update_gate.h); empty: every update is applied.
  std::function<UpdateDecision(const UpdateSigns&)> gate = {};
};

struct CheckpointRun {
  std::map<std::int64_t, reference::State> states;  ///< by steps done: put together in memory, just before save()
  reference::State end;
  std::vector<StepResult> steps;                    ///< of rank 0
  std::vector<std::vector<CheckpointTimes>> times;  ///< [ranks]
  std::vector<std::vector<std::string>> problems;   ///< [ranks]
  std::vector<std::filesystem::path> newest;        ///< [ranks]
  std::vector<std::vector<std::int64_t>> rows;      ///< [ranks] of the last step
  double copies_that_differ = 0;                    ///< elements that two ranks hold with other bits, in any recorded state
};

[[nodiscard]] CheckpointRun run_checkpoints(const CheckpointScript& script, const RunContext& context);

/// What the manifests of the script's run say beside the tensors; saved after `steps_done` steps.
[[nodiscard]] CheckpointInfo info_of(const PairInputs& inputs, std::int64_t steps_done);

/// "step-00000002" below `folder`, by its definition in docs/formats.md.
[[nodiscard]] std::filesystem::path step_folder(const std::filesystem::path& folder, std::int64_t step);

/// How many fields and tensors of two states differ; the first of them is the property's tensor.
[[nodiscard]] Property equal_states(const std::string& name, const reference::State& expected, const reference::State& found,
                                    const std::string& derivation, int step = -1);
/// The same of a step folder, as the reference reads it; NaN and the reason where it cannot be read.
[[nodiscard]] Property equal_on_disk(const std::string& name, const reference::State& expected,
                                     const std::filesystem::path& folder, const std::string& derivation, int step = -1);
/// Steps in which two runs differ in anything: loss, norm, clipping, learning rate, loss scale, skipping.
[[nodiscard]] double steps_that_differ(const std::vector<StepResult>& expected, const std::vector<StepResult>& found);

}  // namespace tandem

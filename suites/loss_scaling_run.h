// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/trace.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/engine/engine.h"
#include "suites/pair.h"

namespace tandem {

/// Training steps of the engine in which gradients overflow where a script wants them to.
struct Script {
  PairInputs inputs;  ///< `steps` of them, with its own optimizer; also the length of the schedule
  /// Whether `rank` finds an element in its reduced gradients that is not finite (infinite and NaN by turns). Empty: never.
  std::function<bool(int rank, std::int64_t step)> overflows = {};
  /// Part of the name of the tensor that is spoiled; empty: the first that the rank keeps a part of.
  std::string spoiled = {};
  std::function<bool(std::int64_t step)> left_out = {};                          ///< steps that are not run at all. Empty: none
  std::function<void(Engine&)> prepare = {};                                     ///< after initialisation
  std::function<void(Engine&, std::int64_t step)> before_step = {};              ///< on every rank
  TraceSink trace = {};                                                          ///< of rank 0
  std::function<void(const ParameterStore&, std::int64_t step)> gradients = {};  ///< of rank 0, reduced
  // Resume:
  std::int64_t first_step = 0;
  std::filesystem::path load = {};  ///< empty: from the start
  std::filesystem::path save = {};
  std::int64_t save_after = -1;  ///< steps done
};

/// What one rank has after one step.
struct RankStep {
  std::int64_t step = 0;
  StepResult result;
  LossScalerState scaler;
  Fp8ScalingState fp8;
  std::int64_t updates = 0;
  std::uint64_t state_hash = 0;   ///< of stored parameters, master copies and moments
  std::int64_t stale_copies = 0;  ///< stored elements that are not the rounded master copy
};

struct ScriptedRun {
  /// Sides of a comparison: whole master copies and moments at the end, with losses, norms and scales of every step; initial
  /// parameters.
  Evidence evidence;
  std::vector<RankStep> start;               ///< [ranks] after preparation and loading
  std::vector<std::vector<RankStep>> steps;  ///< [ranks][steps run]

  [[nodiscard]] std::int64_t skipped() const;
};

[[nodiscard]] ScriptedRun run_script(const Script& script, const RunContext& context, const std::string& side);

/// Number of elements of `steps` (all ranks) for which `bad` is true.
[[nodiscard]] double count_steps(const ScriptedRun& run, const std::function<bool(const RankStep&)>& bad);
/// Ranks that differ from rank 0 after some step: in decision, scale, counter, updates, learning rate or fp8 state.
[[nodiscard]] Property ranks_agree(const ScriptedRun& run);

}  // namespace tandem

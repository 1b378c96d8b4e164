// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/batch_source.h"
#include "core/optimizer_config.h"
#include "core/plan.h"
#include "harness/case.h"
#include "optimized/engine/engine.h"

namespace tandem {

/// What both sides of a comparison are given.
struct PairInputs {
  GptConfig model;
  TrainingPlan plan;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  std::int64_t steps = 4;  ///< K steps of `optimizer`
  std::shared_ptr<const BatchSource> data;
  std::uint64_t seed = 1;          ///< of parameters and dropout masks
  double sgd_learning_rate = 0.5;  ///< of the one SGD step
  bool optimizer_frozen = false;   ///< planted: neither side learns
};

/// The reference's record, as the stages that harness/evidence.h lists. `ranks` and `micro_batches`: simulated in lockstep.
/// Real is float or double.
template <class Real>
[[nodiscard]] Evidence reference_evidence(const PairInputs& inputs, int ranks, int micro_batches);

/// What the engine did, and what was measured in its K steps.
struct EngineRun {
  Evidence evidence;
  Measured measured;
  std::vector<BytesByCategory> peak_bytes;  ///< [ranks]
};

/// Runs the engine on plan.parallel.data ranks twice: one SGD step, whose gradients are caught before the optimizer, then K steps
/// of the own optimizer, the first of which is the warm-up of the measurement. Fresh memory is poisoned.
[[nodiscard]] EngineRun engine_run(const PairInputs& inputs, const RunContext& context, const std::string& side_suffix = "");

/// truth: one rank of the double reference; yardstick: the lockstep reference in the plan's precision and layout; candidate:
/// engine.
[[nodiscard]] CaseEvidence compare_with_reference(const PairInputs& inputs, const RunContext& context);

/// Prediction of the memory peak of one rank (docs/measuring.md): parameters, gradients, moments, kept activations of the largest
/// micro-batch; worst rank.
[[nodiscard]] BytesByCategory predicted_peak(const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer,
                                             std::int64_t sequence);

/// Bytes that all ranks send for the gradients of one step: ranks * 2 b (ranks - 1) / ranks, b = bytes of all gradients.
[[nodiscard]] std::int64_t predicted_gradient_bytes(const GptConfig& model, const TrainingPlan& plan);

}  // namespace tandem

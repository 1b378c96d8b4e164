// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/batch_source.h"
#include "core/config.h"
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
  std::int64_t steps = 4;  ///< K steps of `optimizer`; 0: the SGD step alone
  std::shared_ptr<const BatchSource> data;
  std::uint64_t seed = 1;  ///< of parameters and dropout masks
  Initialization initialization = Initialization::scattered;
  double sgd_learning_rate = 0.5;  ///< of the one SGD step
  bool optimizer_frozen = false;   ///< planted: neither side learns
  /// Time that every operation takes beside its own, spent asleep (Engine); for what more ranks than cores do at once.
  std::function<double(const Operation&)> injected_seconds = {};
  bool watched = true;  ///< the K steps are recorded on a timeline
  /// Of the reference alone: 0: the initial parameters of the seed; k > 0: those moved by about a rounding of the plan's
  /// precision, p (1 +- 2 u) rounded to fp32, with signs drawn for this k.
  std::int64_t neighbour = 0;
};

/// What a run of the reference decided. Runs that decide otherwise compute something else, not the same less exactly.
struct ReferenceDecisions {
  double smallest_margin = 0;      ///< of routing (reference/routing.h); infinite without experts
  std::int64_t skipped_steps = 0;  ///< that overflowed
};

/// The reference's record, as the stages that harness/evidence.h lists. `ranks` and `micro_batches`: data parallelism simulated
/// in lockstep. Real is float or double. `decisions` may be null.
template <class Real>
[[nodiscard]] Evidence reference_evidence(const PairInputs& inputs, int ranks, int micro_batches,
                                          ReferenceDecisions* decisions = nullptr);

/// What the engine did, and what was measured in its K steps.
struct EngineRun {
  Evidence evidence;
  Measured measured;
  std::vector<BytesByCategory> peak_bytes;  ///< [ranks]
  std::vector<BytesByCategory> rest_bytes;  ///< [ranks] after the last step
  std::vector<BytesByCategory> host_bytes;  ///< [ranks] in host memory, after the last step
  // Element s belongs to step s:
  std::vector<double> auxiliary_losses;
  std::vector<std::int64_t> kept_assignments, dropped_assignments;
  std::vector<std::vector<std::int64_t>> rows;  ///< [ranks] rows of the global batch that the rank worked on in the SGD step
};

/// Runs the engine on the plan's ranks twice: one SGD step, whose gradients are caught before the optimizer, then K steps of the
/// own optimizer, the first of which is the warm-up of the measurement. Fresh memory is poisoned. Global tensors are put together
/// from the first replica of each part; every replica of every part is compared by hash.
[[nodiscard]] EngineRun engine_run(const PairInputs& inputs, const RunContext& context, const std::string& side_suffix = "");

/// truth: one rank of the double reference; yardstick: the lockstep reference in fp32 with the plan's data ranks and
/// micro-batches, or where a tensor is beyond its bound by less than ten times, the error to expect of it (expected_yardstick());
/// candidate: engine.
[[nodiscard]] CaseEvidence compare_with_reference(const PairInputs& inputs, const RunContext& context);
/// The same, and the engine's run beside it.
[[nodiscard]] CaseEvidence compare_with_reference(const PairInputs& inputs, const RunContext& context, EngineRun& run);

/// First tensor of one training step, in order of execution, where the engine leaves the reference; nothing where it does not,
/// and nothing in fp8.
[[nodiscard]] std::optional<Localisation> localise(const PairInputs& inputs, const RunContext& context);

/// Unit roundoff of what a plan computes in: of its storage, or of the narrower operands of its products.
[[nodiscard]] double candidate_roundoff(const TrainingPlan& plan);
/// Probabilities of experts nearer to each other than this may change places in the plan's precision.
[[nodiscard]] double decided_margin(const TrainingPlan& plan);

/// The training run of `inputs`: their model, plan, optimizer, schedule, steps, seed and initial parameters; the rest at its
/// default.
[[nodiscard]] RunConfig run_config_of(const PairInputs& inputs);

/// "data 2 tensor 2 sequence-parallel zb-v x 2": the axes that a plan uses.
[[nodiscard]] std::string describe_layout(const TrainingPlan& plan);

}  // namespace tandem

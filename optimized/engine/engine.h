// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/batch.h"
#include "core/optimizer_config.h"
#include "core/plan.h"
#include "core/step_program.h"
#include "optimized/data_parallel/gradient_sync.h"
#include "optimized/engine/gpt_stage.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/engine/rank_context.h"

namespace tandem {

struct EngineOptions {
  GptConfig model;
  TrainingPlan plan;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  std::int64_t total_steps = 1;  ///< of the run, for the schedule
  std::uint64_t dropout_seed = 1;
  /// Time that each operation takes beside its own, asleep inside its span: stands in for work of a stated size where more ranks
  /// than cores work at once. Empty: none.
  std::function<double(const Operation&)> injected_seconds = {};
};

struct StepResult {
  double loss = 0;           ///< mean over the valid tokens of the global batch, before the update; the same on all ranks
  double gradient_norm = 0;  ///< before clipping
  double clip_coefficient = 1;
  double learning_rate = 0;
  std::int64_t valid_tokens = 0;  ///< of the global batch
  // With experts:
  double auxiliary_loss = 0;                                   ///< weighted, not part of `loss`
  std::int64_t kept_assignments = 0, dropped_assignments = 0;  ///< of tokens to experts, over all layers
};

/// One rank's trainer: executes the step program of its plan. There is no second one: techniques are rewrites of the program.
class Engine {
 public:
  /// Throws InputError where the plan is not legal for the model. Parameters are not set: initialise or assign them.
  Engine(const RankContext& context, EngineOptions options);

  [[nodiscard]] ParameterStore& store() noexcept { return store_; }
  [[nodiscard]] const ParameterStore& store() const noexcept { return store_; }
  [[nodiscard]] const EngineOptions& options() const noexcept { return options_; }
  [[nodiscard]] const RankContext& context() const noexcept { return context_; }
  [[nodiscard]] const ProcessGroups& groups() const noexcept { return groups_; }

  /// One step on the global batch, of which this rank computes its rows (micro_batch_rows) and tokens. Collective. `step` counts
  /// from 0 and is the key of schedule and dropout. Throws InputError for tokens outside the vocabulary.
  StepResult train_step(const Batch& global_batch, std::int64_t step);

  /// Mean loss over the valid tokens of `global_batch`, forward only, without dropout. Collective.
  [[nodiscard]] double evaluate(const Batch& global_batch);

  /// Called after the reduction of the gradients and before norm and update.
  void set_gradient_observer(std::function<void(const Engine&)> observer) { gradient_observer_ = std::move(observer); }

  /// Rows of the global batch that this rank worked on in the last step.
  [[nodiscard]] std::vector<std::int64_t> rows() const;

  [[nodiscard]] std::int64_t updates() const noexcept { return updates_; }
  /// For resume: how many updates the moments have seen.
  void set_updates(std::int64_t updates) noexcept { updates_ = updates; }
  /// The program that the last step executed.
  [[nodiscard]] const StepProgram& program() const noexcept { return program_; }

 private:
  struct StepState;
  [[nodiscard]] StepInputs inputs_of(const Batch& global_batch, const GlobalBatch& dealt, std::int64_t step, bool training) const;
  void execute(const Operation& operation, StepState& state);
  void communicate(const Operation& operation, StepState& state);
  void know_tokens(StepState& state);
  void share_totals(StepState& state);
  [[nodiscard]] double loss_scale(const Batch& part, const StepState& state) const;
  void zero_gradients();
  void reduce_gradients(const Operation& operation);
  void reduce_bucket(int bucket);
  void reduce_all_buckets();
  void sum_tied_after_scatter(Communicator& replicas, TensorView bucket);
  void reduce_tensor_partials(const Operation& operation);
  void finish_gradients(StepState& state);
  void share_norm(StepState& state);
  void clip(StepState& state);
  void update(StepState& state);

  RankContext context_;
  EngineOptions options_;
  ProcessGroups groups_;
  ParameterStore store_;
  GptStage stage_;
  GradientSync sync_;
  std::vector<GradientBucket> buckets_;
  StepProgram program_;
  std::int64_t program_sequence_ = -1;
  StepProgram evaluation_;
  std::pair<std::int64_t, std::int64_t> evaluation_shape_{-1, -1};  // rows, sequence
  std::int64_t updates_ = 0;
  std::function<void(const Engine&)> gradient_observer_;
};

}  // namespace tandem

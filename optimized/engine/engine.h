// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
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
};

struct StepResult {
  double loss = 0;           ///< mean over the valid tokens of the global batch, before the update; the same on all ranks
  double gradient_norm = 0;  ///< before clipping
  double clip_coefficient = 1;
  double learning_rate = 0;
  std::int64_t valid_tokens = 0;  ///< of the global batch
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

  /// One step on the global batch, of which this rank computes its rows (micro_batch_rows). `step` counts from 0 and is the key
  /// of schedule and dropout. Throws InputError for tokens outside the vocabulary.
  StepResult train_step(const Batch& global_batch, std::int64_t step);

  /// Mean loss over the valid tokens of `global_batch`, forward only, without dropout; rows are dealt to the ranks.
  [[nodiscard]] double evaluate(const Batch& global_batch);

  /// Called after the reduction of the gradients and before norm and update.
  void set_gradient_observer(std::function<void(const Engine&)> observer) { gradient_observer_ = std::move(observer); }

  [[nodiscard]] std::int64_t updates() const noexcept { return updates_; }
  /// For resume: how many updates the moments have seen.
  void set_updates(std::int64_t updates) noexcept { updates_ = updates; }
  /// The program that the last step executed.
  [[nodiscard]] const StepProgram& program() const noexcept { return program_; }

 private:
  struct StepState;
  void execute(const Operation& operation, StepState& state);
  void communicate(const Operation& operation, StepState& state);
  void begin_micro_batch(int micro_batch, const StepState& state);
  [[nodiscard]] double loss_scale(const Batch& part, const StepState& state) const;
  void zero_gradients();
  void reduce_bucket(int bucket);
  void finish_gradients(StepState& state);
  void update(StepState& state);

  RankContext context_;
  EngineOptions options_;
  ParameterStore store_;
  GptStage stage_;
  GradientSync sync_;
  std::vector<GradientBucket> buckets_;
  StepProgram program_;
  std::int64_t program_sequence_ = -1;
  std::int64_t updates_ = 0;
  std::function<void(const Engine&)> gradient_observer_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/batch.h"
#include "core/optimizer_config.h"
#include "core/plan.h"
#include "core/step_program.h"
#include "optimized/data_parallel/compressed_sync.h"
#include "optimized/data_parallel/gradient_sync.h"
#include "optimized/engine/gpt_stage.h"
#include "optimized/engine/graph_segments.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/engine/update_gate.h"
#include "optimized/loss_scaling/fp8.h"
#include "optimized/loss_scaling/loss_scaler.h"
#include "optimized/rank_context.h"

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
  /// Called with the reduced gradients before anybody looks at them, to put a fault into what this rank keeps. Empty: none.
  std::function<void(ParameterStore&, std::int64_t step)> inject_gradient_fault = {};
  /// Decides about each update when the gradients are complete and nothing has been changed yet; collective, the same on all
  /// ranks. Not asked where the loss scaler has found an overflow. Empty: every update is applied.
  std::function<UpdateDecision(const UpdateSigns&)> gate = {};
  /// Called in training steps with the output of each block of this rank's forward pass, [tokens, hidden], as later blocks read
  /// it: to look at it, or to put a fault into it; on a device a copy of the host's, which is put back. Empty: nobody.
  std::function<void(std::int64_t step, int layer, TensorView output)> on_activation = {};
  /// Called with each part of this rank's own gradients just before it is summed over the replicas (once a step where there are
  /// none), to put a fault into it; on a device as on_activation. Empty: nobody.
  std::function<void(std::int64_t step, TensorView gradients)> touch_gradients = {};
  /// The scheduled learning rate is multiplied by it. Empty: 1.
  std::function<double(std::int64_t step)> learning_rate_factor = {};
};

struct StepResult {
  double loss = 0;           ///< mean over the valid tokens of the global batch, before the update; the same on all ranks
  double gradient_norm = 0;  ///< before clipping, in units of the unscaled loss
  double clip_coefficient = 1;
  double learning_rate = 0;
  std::int64_t valid_tokens = 0;  ///< of the global batch
  double loss_scale = 1;          ///< that this step ran with
  bool skipped = false;           ///< the gradient was not finite, or the gate said so: nothing was updated
  bool retry = false;             ///< the gate wants this step once more: nothing was updated, nothing counts it
  // With experts:
  double auxiliary_loss = 0;                                   ///< weighted, not part of `loss`
  std::int64_t kept_assignments = 0, dropped_assignments = 0;  ///< of tokens to experts, over all layers
};

/// One rank's trainer: executes the step program of its plan. There is no second one: techniques are rewrites of the program.
class Engine {
 public:
  /// Throws InputError where the plan is not legal for the model. Parameters are not set: initialise or assign them.
  /// The arena lies in the memory of the kernels (ContractError). On a device the world is told of it (Communicator::set_memory)
  /// until the end of the engine: one engine of a world at a time.
  Engine(const RankContext& context, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

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
  void set_updates(std::int64_t updates) noexcept { updates_ = loaded_updates_ = updates; }
  /// Of what the plan keeps in host memory; nothing there otherwise.
  [[nodiscard]] MemoryLedger host_ledger() const { return host_ != nullptr ? host_->ledger() : MemoryLedger(); }
  [[nodiscard]] LossScaler& loss_scaler() noexcept { return scaler_; }
  [[nodiscard]] const LossScaler& loss_scaler() const noexcept { return scaler_; }
  /// Scales of fp8 operands; null where the plan has none.
  [[nodiscard]] Fp8Scaling* fp8_scaling() noexcept { return fp8_ ? &*fp8_ : nullptr; }
  [[nodiscard]] const Fp8Scaling* fp8_scaling() const noexcept { return fp8_ ? &*fp8_ : nullptr; }
  /// What gradient buckets are coded with, and what is left over from earlier steps; null where nothing is compressed.
  [[nodiscard]] CompressedReduction* compression() noexcept { return compressed_ ? &compressed_->reduction() : nullptr; }
  [[nodiscard]] const CompressedReduction* compression() const noexcept {
    return compressed_ ? &compressed_->reduction() : nullptr;
  }
  /// The program that the last step executed.
  [[nodiscard]] const StepProgram& program() const noexcept { return program_; }

 private:
  struct StepState;
  /// A communication in the background, and what this rank does with its result.
  struct UnderWay {
    Work work{};
    std::function<void()> then{};
  };
  [[nodiscard]] StepInputs inputs_of(const Batch& global_batch, const GlobalBatch& dealt, std::int64_t step, bool training) const;
  void execute_all(StepState& state);
  void execute(OperationId id, StepState& state);
  [[nodiscard]] bool records_graphs() const;
  void start(OperationId id, const Operation& operation, UnderWay under_way);
  void wait_for_background(const StepProgram& program, const Operation& operation);
  void allocate(const Operation& operation);
  void free(const Operation& operation);
  void communicate(OperationId id, const Operation& operation, StepState& state);
  void finish_micro_batch(const Operation& operation);
  void round_gradients_to_storage();
  void know_tokens(StepState& state);
  void share_totals(StepState& state);
  [[nodiscard]] double loss_scale(const Batch& part, const StepState& state) const;
  void zero_gradients();
  void reduce_gradients(OperationId id, const Operation& operation, StepState& state);
  [[nodiscard]] UnderWay reduce_bucket(int bucket, Progress progress);
  void reduce_all_buckets();
  [[nodiscard]] UnderWay scatter_bucket(const Operation& operation);
  void gather_parameters(OperationId id, const Operation& operation);
  void sum_tied_after_scatter(Communicator& replicas, TensorView bucket);
  void reduce_tensor_partials(const Operation& operation);
  void show_own_gradients(TensorView gradients, StepState& state);
  void finish_gradients(StepState& state);
  void share_partials(const Operation& operation, StepState& state);
  void share_norm(StepState& state);
  [[nodiscard]] int expert_rank() const { return groups_.here().data % options_.plan.parallel.expert; }
  void agree_on_overflow(StepState& state);
  void clip(StepState& state);
  [[nodiscard]] bool finish_scaled_step(const StepState& state);
  [[nodiscard]] UpdateDecision ask_gate(StepState& state);
  void leave_out(const UpdateDecision& decision, StepState& state);
  void update(StepState& state);

  RankContext context_;
  EngineOptions options_;
  ProcessGroups groups_;
  std::unique_ptr<Arena> host_;  // of what is left with the host; else null
  ParameterStore store_;
  std::optional<Fp8Scaling> fp8_;
  GptStage stage_;
  GradientSync sync_;
  LossScaler scaler_;
  std::vector<GradientBucket> buckets_;
  std::unique_ptr<CompressedSync> compressed_;  // null: gradients travel as they are
  std::map<OperationId, UnderWay> under_way_;   // of the program that is executed
  StepProgram program_;
  std::int64_t program_sequence_ = -1;
  std::vector<GraphSegment> segments_;  // of the program, where it is executed as graphs
  bool arena_has_grown_ = false;        // to what the program needs: it has been executed once
  StepProgram evaluation_;
  std::pair<std::int64_t, std::int64_t> evaluation_shape_{-1, -1};  // rows, sequence
  std::int64_t current_step_ = 0;
  std::int64_t busy_ns_ = 0;  // own work so far; counted where somebody asks
  std::int64_t updates_ = 0;
  std::int64_t loaded_updates_ = 0;  // for pitfalls: what a run that forgets where it was counts from
  std::function<void(const Engine&)> gradient_observer_;
};

}  // namespace tandem

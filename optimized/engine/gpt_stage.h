// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/batch.h"
#include "core/pipeline_layout.h"
#include "core/rng.h"
#include "core/step_program.h"
#include "optimized/engine/layout.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/expert_parallel/routing.h"
#include "optimized/hybrid_parallel/process_groups.h"
#include "optimized/loss_scaling/fp8.h"
#include "optimized/rank_context.h"

namespace tandem {

/// This rank's tokens of one micro-batch: whole rows, or under context parallelism its slice of each.
struct MicroBatch {
  Batch batch;
  MicroBatchShape shape;
  double loss_scale = 0;  ///< what the sum of losses is multiplied by: gradient_scale / (valid tokens of the global batch)
};

/// What a step has in common over its micro-batches.
struct StepInputs {
  std::vector<MicroBatch> micro_batches;
  std::int64_t global_rows = 0;
  std::uint64_t dropout_seed = 0;
  std::uint32_t step = 0;
  bool training = true;       ///< dropout, and gradients of the loss
  double gradient_scale = 1;  ///< of the loss whose gradient is computed: the loss scale
};

/// Sums over this rank's tokens since the last call.
struct StageTotals {
  double loss_sum = 0;  ///< of valid tokens; the same on all tensor ranks, 0 on ranks without the head
  double auxiliary_loss = 0;
  std::int64_t kept = 0, dropped = 0;  ///< assignments of tokens to experts
};

/// This rank's part of the model: executes the compute and activation communication of a step program on the memory that the
/// program's allocate operations hand it. Gradients are accumulated into the parameter store.
///
///   h = dropout(wte[ids] + wpe[positions])
///   block: middle = h + dropout(c_proj(attention(c_attn(ln_1(h)))));  out = middle + dropout(mlp(ln_2(middle)))
///   logits = ln_f(out) head^T
///
/// One file for each kind of part: stage_embedding.cpp, stage_attention.cpp, stage_ring.cpp, stage_mlp.cpp, stage_experts.cpp,
/// stage_head.cpp, stage_communication.cpp.
class GptStage {
 public:
  /// Borrows everything. `fp8`: scales of the operands of linear layers inside blocks; null: they are used as they are.
  GptStage(const RankContext& context, const GptConfig& model, const TrainingPlan& plan, const ProcessGroups& groups,
           ParameterStore& store, Fp8Scaling* fp8 = nullptr);

  [[nodiscard]] const LocalModel& local() const noexcept { return local_; }
  void begin_step(StepInputs inputs);
  /// Once the valid tokens of the global batch are known.
  void set_loss_scale(int micro_batch, double scale) { at(micro_batch).loss_scale = scale; }
  [[nodiscard]] const StepInputs& inputs() const noexcept { return inputs_; }

  void allocate(const Operation& op);
  /// Memory that a message is still being sent from is kept until it has arrived.
  void free(const Operation& op);
  /// Waits until all messages have arrived; before the end of a step.
  void finish_messages();
  /// `next`: what the program does after `op`, or null; on a device two operations in a row may be one kernel.
  void compute(const Operation& op, const Operation* next = nullptr);
  /// What is left to wait for: of an operation in the background, its result; else nothing.
  [[nodiscard]] Work communicate(const Operation& op);

  [[nodiscard]] StageTotals take_totals() noexcept;
  [[nodiscard]] const StageTotals& totals() const noexcept { return totals_; }

  /// Called with the output of each block in the forward pass of training steps. Empty: nobody.
  using OutputObserver = std::function<void(int layer, TensorView output)>;
  void set_output_observer(OutputObserver observer) { output_observer_ = std::move(observer); }

 private:
  // A block's parameters by name in definition order; those of a dense MLP, the router, and those of the local experts.
  struct BlockParameters {
    std::size_t norm1_weight, norm1_bias, qkv_weight, qkv_bias, projection_weight, projection_bias, norm2_weight, norm2_bias;
    struct Mlp {
      std::size_t fc_weight, fc_bias, projection_weight, projection_bias;
    };
    std::vector<Mlp> mlps;  // one, or one for each local expert
    std::size_t router = 0;
  };
  // Identity of an allocation: category, part, phase, layer, micro-batch, chunk, stage.
  using MemoryKey = std::tuple<MemoryCategory, Part, Phase, int, int, int, int>;
  // Routing of one block's tokens, from its forward to its backward pass.
  struct Routing {
    std::vector<std::int32_t> choices;       // [tokens, choices]
    std::vector<std::int32_t> slots;         // [tokens, choices] row of combine_in, -1 dropped
    std::vector<std::int32_t> slot_tokens;   // [experts * own slots] token, -1 empty
    std::vector<double> first_choice_share;  // [rows, experts]
    std::vector<std::int32_t> all_choices;   // of whole rows, by position
  };

  [[nodiscard]] static MemoryKey key_of(const Operation& op);
  [[nodiscard]] const Arena::Buffer& memory(MemoryCategory category, Part part, Phase phase, int layer, int micro_batch,
                                            int chunk, int stage = -1) const;
  [[nodiscard]] MicroBatch& at(int micro_batch) { return inputs_.micro_batches[static_cast<std::size_t>(micro_batch)]; }
  [[nodiscard]] const MicroBatch& at(int micro_batch) const {
    return inputs_.micro_batches[static_cast<std::size_t>(micro_batch)];
  }
  [[nodiscard]] std::int64_t expected_bytes(const Operation& op) const;

  // Views of what operation `op` works on.
  [[nodiscard]] BlockActivations block(const Operation& op, int layer) const;
  [[nodiscard]] BlockActivations block(const Operation& op) const { return block(op, op.layer); }
  [[nodiscard]] BlockGradients block_gradients(const Operation& op) const;
  [[nodiscard]] PassWorkspace workspace(const Operation& op) const;
  [[nodiscard]] BlockStorage storage_of(const Operation& op, int layer) const;
  [[nodiscard]] TensorView block_input(const Operation& op) const;  ///< [slice, hidden]
  [[nodiscard]] TensorView chunk_output(const Operation& op) const;
  [[nodiscard]] TensorView stream(const Operation& op) const;  ///< gradient of the residual stream, updated in place
  [[nodiscard]] TensorView embedding_out(const Operation& op) const;
  [[nodiscard]] HeadActivations head(const Operation& op) const;
  [[nodiscard]] HeadWorkspace head_workspace(const Operation& op) const;
  [[nodiscard]] TensorView head_gradient(const Operation& op) const;
  [[nodiscard]] TensorView message(const Operation& op) const;
  [[nodiscard]] TensorView slice_of(const Operation& op, TensorView all_tokens) const;
  [[nodiscard]] const BlockParameters& parameters_of(int layer) const;
  [[nodiscard]] TensorView parameter(std::size_t index) const { return store_.parameter(index); }
  [[nodiscard]] TensorView gradient(std::size_t index) const { return store_.gradient(index); }
  [[nodiscard]] DropoutSpec residual_dropout(const Operation& op, DropoutSite site, double probability) const;
  [[nodiscard]] DropoutSpec attention_dropout(const Operation& op) const;
  [[nodiscard]] AttentionShape attention_shape(const Operation& op) const;

  // What an operation does; a recomputed one is done as the forward one that it repeats.
  [[nodiscard]] Operation begin(const Operation& op);
  void do_compute(const Operation& op);
  [[nodiscard]] bool merges_norm_2(const Operation& op, const Operation* next) const;
  [[nodiscard]] Work do_communicate(const Operation& op);

  void embedding_lookup_forward(const Operation& op);
  void embedding_forward(const Operation& op);
  void embedding_backward(const Operation& op);
  void embedding_lookup_backward(const Operation& op);

  void norm_1(const Operation& op);
  void attention_in(const Operation& op);
  void whole_attention(const Operation& op);
  void attention_core(const Operation& op);
  void attention_out(const Operation& op);
  void attention_merge(const Operation& op);
  void norm_2(const Operation& op);
  void block_weights(const Operation& op);
  void row_parallel_weights(const Operation& op, Fp8Linear linear, TensorView x, TensorView dy, TensorView dweight,
                            TensorView dbias);

  // Context parallelism: one segment of the ring. A run of queries is contiguous in a row, but not over several rows.
  struct RunBuffers {
    Arena::Buffer out_memory, logsumexp_memory;
    TensorView out, logsumexp;
  };
  [[nodiscard]] RunBuffers load_run(const Operation& op, const AttentionSegment& segment, std::int64_t query, TensorView out,
                                    TensorView logsumexp);
  void store_run(const Operation& op, const AttentionSegment& segment, std::int64_t query, const RunBuffers& run, TensorView out,
                 TensorView logsumexp);
  void copy_run(const Operation& op, const AttentionSegment& segment, std::int64_t query, TensorView all, TensorView part,
                std::int64_t outer, std::int64_t inner, bool load) const;
  void ring_forward(const Operation& op);
  void ring_backward(const Operation& op);
  void pack_keys_values(const Operation& op, TensorView packed);
  void take_home_key_value_gradients(const Operation& op);
  void ring_shift(const Operation& op);
  template <class Use>
  void for_each_segment(const Operation& op, const Use& use);

  /// Runs `use(tokens, out)` for the tokens whose product is made in this operation: all, or those of the piece by tensor rank,
  /// into `whole` or the place of the piece in the workspace.
  template <class Use>
  void for_tokens_of_piece(const Operation& op, TensorView whole, const Use& use) const;

  void linear_weights(const Operation& op, Fp8Linear linear, TensorView x, TensorView dy, TensorView dweight, TensorView dbias);

  void mlp(const Operation& op);
  void mlp_forward(const Operation& op, const BlockActivations& a);
  void mlp_backward_input(const Operation& op, const BlockActivations& a);
  void mlp_merge(const Operation& op);
  void mlp_weights(const Operation& op);

  void router(const Operation& op);
  void dispatch(const Operation& op);
  void experts(const Operation& op);
  void combine(const Operation& op);
  void route(const Operation& op);
  void exchange_choices(const Operation& op);
  void router_backward(const Operation& op);
  struct Narrowed {
    Arena::Buffer memory;
    TensorView values;
  };
  [[nodiscard]] Narrowed as_stored(TensorView values);
  /// An operand of a linear layer as the product takes it: as fp8 numbers in a copy, or as it is where there is no fp8.
  [[nodiscard]] Narrowed operand(const Operation& op, Fp8Linear linear, Fp8Operand which, TensorView values);
  void first_gates(const Routing& routing, const RoutingShape& shape, const BlockActivations& a) const;
  void expert_weights(const Operation& op);
  [[nodiscard]] RoutingShape routing_shape(const Operation& op) const;
  void permute(const Operation& op, TensorView by_peer, TensorView by_expert, bool to_experts) const;

  void head_norm(const Operation& op);
  void head_logits(const Operation& op);
  void head_loss(const Operation& op);
  [[nodiscard]] std::vector<std::int32_t> local_targets(const Operation& op, Interval tokens) const;
  [[nodiscard]] const std::vector<std::int32_t>& targets_of(const Operation& op) const;
  void vocabulary_gradient(const Operation& op, Interval tokens, std::span<const std::int32_t> targets, TensorView logits,
                           TensorView logsumexp);
  [[nodiscard]] std::size_t head_index() const { return model_.tied ? *wte_ : *lm_head_; }

  [[nodiscard]] Work sum_over_tensor_ranks(const Operation& op, TensorView full, TensorView slice);
  [[nodiscard]] Work sum_piece(const Operation& op, int pieces, TensorView slice);
  void gather_slices(const Operation& op, TensorView full);
  void gather_embedding_gradient(const Operation& op);
  void send_message(const Operation& op);
  void take_over(const Operation& op);
  void collect_arrived();
  void receive_message(const Operation& op);
  void exchange_slots(const Operation& op);
  void gather_statistics(const Operation& op);

  // Tracing; nothing where the sink is empty.
  enum class Tokens : std::uint8_t { all, slice };
  void trace(const Operation& op, std::string name, TensorView values, Tokens tokens, std::vector<Interval> columns,
             std::int64_t width) const;
  void trace_logits(const Operation& op, std::string_view what, TensorView logits, Interval tokens) const;
  void trace_hidden(const Operation& op, std::string_view what, TensorView values, Tokens tokens) const;
  void trace_wide(const Operation& op, std::string_view what, TensorView values, Interval tokens) const;
  void trace_rows(const Operation& op, std::string name, TensorView values, Interval tokens, std::vector<Interval> columns,
                  std::int64_t width) const;
  [[nodiscard]] bool tracing() const { return static_cast<bool>(context_.trace) && inputs_.training && !recomputing_; }
  [[nodiscard]] std::string traced_name(const Operation& op, std::string_view what) const;

  RankContext context_;
  GptConfig model_;
  const ProcessGroups& groups_;
  ParameterStore& store_;
  LocalModel local_;
  PipelineLayout stages_;
  DType dtype_;
  std::map<int, BlockParameters> block_parameters_;  // by layer
  std::optional<std::size_t> wte_, wpe_, final_norm_, lm_head_;
  StepInputs inputs_;
  std::vector<std::vector<std::int64_t>> dropout_rows_;    // [micro-batches] global row of each row
  std::vector<std::vector<std::int64_t>> dropout_tokens_;  // [micro-batches] global token of each token
  std::map<MemoryKey, Arena::Buffer> buffers_;
  std::map<std::pair<int, int>, Routing> routings_;  // by micro-batch and layer
  std::map<const void*, Work> sending_;              // by the memory that is being sent
  struct Departing {
    Arena::Buffer memory;  // freed by the program
    Work work;
  };
  std::vector<Departing> departing_;
  StageTotals totals_;
  OutputObserver output_observer_;
  Fp8Scaling* fp8_;
  bool recomputing_ = false;     // the operation at hand is a forward one that is done again
  bool norm_2_follows_ = false;  // the attention_merge at hand makes it as well
  bool norm_2_done_ = false;     // by the operation before
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <map>
#include <vector>

#include "core/pipeline_layout.h"
#include "core/pitfall.h"
#include "core/step_program.h"
#include "optimized/data_parallel/buckets.h"
#include "optimized/engine/layout.h"
#include "optimized/pipeline_parallel/messages.h"
#include "optimized/pipeline_parallel/schedule.h"

namespace tandem {

/// Builds the program of one rank; see lower(). The pieces of a pass are in lower_pass.cpp and lower_ends.cpp, what surrounds
/// them in lowering.cpp.
class Lowering {
 public:
  enum class Kind : std::uint8_t { training_step, evaluation };
  Lowering(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, int rank, const PitfallSet& pitfalls,
           Kind kind);

  [[nodiscard]] StepProgram program();

 private:
  // One pass of one chunk over one micro-batch.
  struct Pass {
    Phase phase = Phase::forward;
    int chunk = 0;
    int micro_batch = 0;
    int stage = 0;
    MicroBatchShape shape;
  };
  [[nodiscard]] Pass pass_of(Phase phase, int chunk, int micro_batch) const;
  [[nodiscard]] Interval layers_of(const Pass& pass) const { return stages_.layers[static_cast<std::size_t>(pass.stage)]; }
  [[nodiscard]] bool is_first(const Pass& pass) const { return pass.stage == 0; }
  [[nodiscard]] bool is_last(const Pass& pass) const { return pass.stage == stages_.stages() - 1; }
  [[nodiscard]] int group_size(GroupAxis axis) const { return group_sizes_[static_cast<std::size_t>(axis)]; }
  [[nodiscard]] bool is_here(int stage) const { return stages_.rank_of_stage(stage) == here_.pipeline; }

  // lowering.cpp
  void training_step();
  void evaluation();
  void slot(const PipelineSlot& slot);
  void scalars(std::int64_t count);
  void sum_of_scalars(GroupAxis axis, std::int64_t count);
  void reduce_gradients();
  void reduce_buckets();
  [[nodiscard]] OperationId last_contribution(const GradientBucket& bucket) const;
  void sums_of_copies();
  void finish_step();
  OperationId push(Operation op);

  // lower_pass.cpp
  void forward(const Pass& pass, bool evaluation);
  void forward_embedding(const Pass& pass);
  void forward_block(const Pass& pass, int layer);
  void forward_mlp(const Pass& pass, int layer);
  void forward_head(const Pass& pass, bool evaluation);
  void backward_input(const Pass& pass, bool with_weights);
  void backward_block(const Pass& pass, int layer);
  void backward_mlp(const Pass& pass, int layer);
  void backward_weight(const Pass& pass, int layer);
  void backward_embedding(const Pass& pass);
  void allocate_block(const Pass& pass, int layer, bool kept, bool rest);
  void free_layer(const Pass& pass, int layer);
  void free_kept(const Pass& pass, int layer);
  void free_rest(const Pass& pass, int layer);
  void free_what_is_recomputed(const Pass& pass, int layer);
  void recompute_before(const Pass& pass, int layer);
  void recompute_block(const Pass& pass, int layer);
  void attention_forward(const Pass& pass, int layer);
  [[nodiscard]] double attention_core_flops(const Pass& pass) const;  ///< forward, whole rows
  void free_chunk(const Pass& pass);
  void take_over(const Pass& pass);

  // lower_zero.cpp: nothing where the plan does not deal gradients (zero 2, 3) or parameters (3), or the unit has one rank.
  void gather(const Pass& pass, int unit);   ///< nothing where it is here
  void release(const Pass& pass, int unit);  ///< nothing where it is not
  void gather_layer(const Pass& pass, int layer);
  void gather_ahead(const Pass& pass, int layer);  ///< on its way while another layer is computed; nothing without prefetch
  [[nodiscard]] std::vector<OperationId> take_gathers(int layer);
  void release_layer(const Pass& pass, int layer);
  /// `additions` more operations will add to the unit's gradient, each followed by close_gradients(); the last one reduces it.
  void open_gradients(const Pass& pass, int unit, int additions);
  void close_gradients(const Pass& pass, int unit);
  /// Gradients of units whose reduce_scatter is under way, for which the free waits.
  void free_scattered(int but_of_layer = -1);
  void update_gathers();
  [[nodiscard]] bool is_dealt(int unit, int stage) const;
  [[nodiscard]] Operation unit_operation(OpKind kind, const Pass& pass, int unit, MemoryCategory category) const;
  void norm_partials();

  [[nodiscard]] static Operation operation(OpKind kind, const Pass& pass, Part part, int layer);
  void compute(const Pass& pass, Part part, int layer, double flops, int piece = 0);
  enum class Timing : std::uint8_t { at_once, background };
  void communicate(const Pass& pass, Collective collective, GroupAxis axis, Part part, int layer, std::int64_t elements,
                   int piece = 0, Timing timing = Timing::at_once);
  /// `part` and the sum over the tensor ranks of what it leaves; in pieces, each summed in the background while the next is
  /// computed, where the plan has tensor_chunks. The next compute() waits for all of them.
  void summed_product(const Pass& pass, Part part, int layer, double flops);
  /// Sum over the tensor ranks of what `part` left, whole or, under sequence parallelism, each rank its slice.
  void sum_over_tensor_ranks(const Pass& pass, Part part, int layer);
  void gather_slices(const Pass& pass, Part part, int layer);
  void memory(OpKind kind, const Pass& pass, MemoryCategory category, Part part, int layer, std::int64_t bytes, int stage = -1);
  void receive_for(const Pass& pass);
  void send_on(const Pass& pass);
  void release_sent();

  template <class Carve>
  [[nodiscard]] std::int64_t bytes_of(const Carve& carve, const Pass& pass) const {
    Carver counter(nullptr, plan_.numerics.storage);
    carve(counter, local_, pass.shape);
    return counter.size_bytes();
  }
  [[nodiscard]] std::int64_t workspace_bytes(const Pass& pass) const;
  [[nodiscard]] BlockStorage storage_of(const Pass& pass, int layer) const {
    return block_storage(local_.recompute, layers_of(pass), layer);
  }
  struct BlockBytes {
    std::int64_t kept = 0, rest = 0;
  };
  [[nodiscard]] BlockBytes block_bytes(const Pass& pass, int layer) const;

  // Units of this rank (parameter_units()) by what they hold; -1: not here.
  struct Units {
    std::vector<GradientBucket> all;
    std::vector<int> ranks, layers;  // [units]
    int token_table = -1, positions = -1, final_norm = -1, head = -1;
    std::map<int, int> of_block, of_experts;  // by layer
    [[nodiscard]] int block(int layer) const { return find(of_block, layer); }
    [[nodiscard]] int experts(int layer) const { return find(of_experts, layer); }
    [[nodiscard]] static int find(const std::map<int, int>& units, int layer) {
      const auto found = units.find(layer);
      return found == units.end() ? -1 : found->second;
    }
  };
  [[nodiscard]] Units find_units() const;

  TrainingPlan plan_;
  PitfallSet pitfalls_;
  ProcessGrid grid_;
  std::array<int, kGroupAxes> group_sizes_;  // of this rank's; counting members anew for every operation takes time at scale
  Coordinates here_;
  LocalModel local_;
  PipelineLayout stages_;
  std::int64_t sequence_;
  int rank_;
  Kind kind_;
  std::vector<std::vector<PipelineSlot>> slots_;  // of every pipeline rank
  PipelineMessages messages_;
  std::vector<LocalParameter> parameters_;
  Units units_;
  std::map<int, Operation> gathered_;      // units whose parameters are here: the allocation
  std::map<int, Operation> opened_;        // units whose gradients are here
  std::map<int, int> additions_;           // to them, not yet closed
  std::map<int, OperationId> gathering_;   // units whose parameters are on their way
  std::map<int, OperationId> scattering_;  // units whose gradients are
  std::vector<OperationId> reducing_;      // buckets that are reduced in the background
  std::vector<OperationId> pieces_;        // of a product, summed in the background
  std::vector<OperationId> late_pieces_;   // planted: waited for one operation too late
  StepProgram program_;
  OperationId last_foreground_ = -1;
  std::vector<Operation> sent_;  // messages under way, whose buffers are freed before the next backward pass
};

}  // namespace tandem

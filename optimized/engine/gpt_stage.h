// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/batch.h"
#include "core/model_config.h"
#include "core/rng.h"
#include "core/step_program.h"
#include "optimized/engine/layout.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/engine/rank_context.h"

namespace tandem {

/// Rows of one micro-batch on this rank and what they share.
struct MicroBatch {
  Batch batch;
  double loss_scale = 0;  ///< 1 / (valid tokens of the whole global batch)
  std::uint64_t dropout_seed = 0;
  std::uint32_t step = 0;
  [[nodiscard]] MicroBatchShape shape() const noexcept { return {batch.rows, batch.sequence}; }
};

/// This rank's part of the model: executes the compute operations of a step program on the memory that the program's allocate
/// operations hand it. Gradients are accumulated into the parameter store.
///
///   h = dropout(wte[ids] + wpe[positions])
///   block: middle = h + dropout(c_proj(attention(c_attn(ln_1(h)))));  out = middle + dropout(c_proj(gelu(c_fc(ln_2(middle)))))
///   logits = ln_f(out) head^T
class GptStage {
 public:
  /// Borrows all three.
  GptStage(const RankContext& context, const GptConfig& model, ParameterStore& store);

  void begin_micro_batch(MicroBatch micro_batch);
  void allocate(const Operation& operation);
  void free(const Operation& operation);
  void compute(const Operation& operation);

  /// Sum (not mean) of the losses of valid tokens since the last call.
  [[nodiscard]] double take_loss_sum() noexcept;

  /// Sum of the losses of `batch`, forward only, without dropout.
  [[nodiscard]] double evaluate(const Batch& batch);

 private:
  // A block's parameters in definition order, counted from its ln_1.weight.
  enum BlockTensor : std::size_t {
    norm1_weight,
    norm1_bias,
    qkv_weight,
    qkv_bias,
    projection_weight,
    projection_bias,
    norm2_weight,
    norm2_bias,
    fc_weight,
    fc_bias,
    mlp_projection_weight,
    mlp_projection_bias,
    block_tensors
  };

  [[nodiscard]] TensorView parameter(int layer, BlockTensor which) const;
  [[nodiscard]] TensorView gradient(int layer, BlockTensor which) const;
  [[nodiscard]] std::size_t head_index() const;  // of the embedding that makes logits
  [[nodiscard]] DropoutSpec dropout(DropoutSite site, int layer, double probability) const;
  [[nodiscard]] AttentionShape attention_shape() const;
  [[nodiscard]] TensorView block_input(int layer) const;

  void embedding_forward();
  void embedding_backward();
  void block_forward(int layer);
  void block_backward_input(int layer);
  void block_backward_weight(int layer);
  void head_forward();
  void head_backward_input();
  void head_backward_weight();
  void forward_head_norm(TensorView input);

  RankContext context_;
  GptConfig model_;
  ParameterStore& store_;
  std::size_t wte_, wpe_, first_block_, final_norm_;
  MicroBatch micro_batch_;
  std::vector<std::int64_t> dropout_rows_;
  bool training_ = true;
  double loss_sum_ = 0;

  Arena::Buffer embedding_memory_, stream_memory_, head_memory_, head_workspace_memory_, block_gradient_memory_;
  std::vector<Arena::Buffer> block_memory_;
  TensorView embedding_out_, stream_;  // stream_: gradient of the residual stream, updated in place
  std::vector<BlockActivations> blocks_;
  BlockGradients block_gradients_;
  HeadActivations head_;
  HeadWorkspace head_workspace_;
};

}  // namespace tandem

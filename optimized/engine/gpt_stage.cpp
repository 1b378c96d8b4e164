// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/gpt_stage.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

namespace tandem {

GptStage::GptStage(const RankContext& context, const GptConfig& model, ParameterStore& store)
    : context_(context),
      model_(model),
      store_(store),
      wte_(store.index_of("wte.weight")),
      wpe_(store.index_of("wpe.weight")),
      first_block_(store.index_of("h.0.ln_1.weight")),
      final_norm_(store.index_of("ln_f.weight")),
      block_memory_(static_cast<std::size_t>(model.layers)),
      blocks_(static_cast<std::size_t>(model.layers)) {}

TensorView GptStage::parameter(int layer, BlockTensor which) const {
  return store_.parameter(first_block_ + static_cast<std::size_t>(layer) * block_tensors + which);
}

TensorView GptStage::gradient(int layer, BlockTensor which) const {
  return store_.gradient(first_block_ + static_cast<std::size_t>(layer) * block_tensors + which);
}

std::size_t GptStage::head_index() const { return model_.tied ? wte_ : store_.index_of("lm_head.weight"); }

void GptStage::begin_micro_batch(MicroBatch micro_batch) {
  micro_batch_ = std::move(micro_batch);
  // Masks belong to rows of the global batch: keyed by local rows, every rank would drop the same elements.
  dropout_rows_ = micro_batch_.batch.row_ids;
  if (context_.pitfalls.on(Pitfall::dropout_keyed_by_local_row))
    std::iota(dropout_rows_.begin(), dropout_rows_.end(), std::int64_t{0});
  training_ = true;
}

DropoutSpec GptStage::dropout(DropoutSite site, int layer, double probability) const {
  DropoutSpec spec;
  if (!training_ || probability == 0.0) return spec;
  spec.key = {micro_batch_.dropout_seed, micro_batch_.step, static_cast<std::uint32_t>(layer), site};
  spec.probability = probability;
  spec.row_ids = dropout_rows_;
  spec.row_elements = site == DropoutSite::attention_probability ? model_.heads * model_.sequence * model_.sequence
                                                                 : model_.sequence * model_.hidden;
  return spec;
}

AttentionShape GptStage::attention_shape() const {
  return {micro_batch_.batch.rows, micro_batch_.batch.sequence,        model_.heads,
          model_.head_size(),      micro_batch_.batch.document_starts, model_.sequence};
}

TensorView GptStage::block_input(int layer) const {
  return layer == 0 ? embedding_out_ : blocks_[static_cast<std::size_t>(layer - 1)].out;
}

void GptStage::allocate(const Operation& op) {
  const MicroBatchShape shape = micro_batch_.shape();
  const DType dtype = store_.parameter(wte_).dtype();
  Arena::Buffer memory = context_.arena->allocate(op.bytes, op.category);
  Carver carver(memory.data(), dtype);
  const bool activations = op.category == MemoryCategory::activations;
  switch (op.part) {
    case Part::embedding:
      (activations ? embedding_out_ : stream_) = carver.take({shape.tokens(), model_.hidden});
      (activations ? embedding_memory_ : stream_memory_) = std::move(memory);
      break;
    case Part::block:
      if (activations) {
        blocks_[static_cast<std::size_t>(op.layer)] = carve_block(carver, model_, shape);
        block_memory_[static_cast<std::size_t>(op.layer)] = std::move(memory);
      } else {
        block_gradients_ = carve_block_gradients(carver, model_, shape);
        block_gradient_memory_ = std::move(memory);
      }
      break;
    case Part::head:
      if (activations) {
        head_ = carve_head(carver, model_, shape);
        head_memory_ = std::move(memory);
      } else {
        head_workspace_ = carve_head_workspace(carver, model_, shape);
        head_workspace_memory_ = std::move(memory);
      }
      break;
  }
  TANDEM_CHECK(carver.size_bytes() == op.bytes,
               fmt::format("{} of {} bytes, but {} are needed", to_string(op), op.bytes, carver.size_bytes()));
}

void GptStage::free(const Operation& op) {
  const bool activations = op.category == MemoryCategory::activations;
  switch (op.part) {
    case Part::embedding: (activations ? embedding_memory_ : stream_memory_).release(); break;
    case Part::block: (activations ? block_memory_[static_cast<std::size_t>(op.layer)] : block_gradient_memory_).release(); break;
    case Part::head: (activations ? head_memory_ : head_workspace_memory_).release(); break;
  }
}

void GptStage::compute(const Operation& op) {
  if (micro_batch_.batch.rows == 0) return;
  const bool forward = op.phase == Phase::forward;
  const bool input = op.phase == Phase::backward_input;
  switch (op.part) {
    case Part::embedding: forward ? embedding_forward() : embedding_backward(); break;
    case Part::block:
      forward ? block_forward(op.layer) : input ? block_backward_input(op.layer) : block_backward_weight(op.layer);
      break;
    case Part::head: forward ? head_forward() : input ? head_backward_input() : head_backward_weight(); break;
  }
}

void GptStage::embedding_forward() {
  const Batch& batch = micro_batch_.batch;
  context_.kernels->embedding_forward(batch.ids, batch.positions, store_.parameter(wte_), store_.parameter(wpe_), embedding_out_);
  const DropoutSpec spec = dropout(DropoutSite::embedding, 0, model_.embedding_dropout);
  if (spec.probability > 0) context_.kernels->dropout_residual_forward(spec, embedding_out_, {}, embedding_out_);
}

void GptStage::embedding_backward() {
  const Batch& batch = micro_batch_.batch;
  const DropoutSpec spec = dropout(DropoutSite::embedding, 0, model_.embedding_dropout);
  if (spec.probability > 0) context_.kernels->dropout_backward(spec, stream_, stream_);
  context_.kernels->embedding_backward(batch.ids, batch.positions, stream_, store_.gradient(wte_), store_.gradient(wpe_));
}

void GptStage::block_forward(int layer) {
  Kernels& k = *context_.kernels;
  BlockActivations& a = blocks_[static_cast<std::size_t>(layer)];
  const TensorView in = block_input(layer);
  const double epsilon = model_.layer_norm_epsilon;
  k.layer_norm_forward(in, parameter(layer, norm1_weight), parameter(layer, norm1_bias), epsilon, a.norm1_out, a.norm1_mean,
                       a.norm1_rstd);
  k.linear_forward(a.norm1_out, parameter(layer, qkv_weight), parameter(layer, qkv_bias), a.qkv);
  k.attention_forward(attention_shape(), dropout(DropoutSite::attention_probability, layer, model_.attention_dropout), a.qkv,
                      a.attention_out, a.logsumexp);
  k.linear_forward(a.attention_out, parameter(layer, projection_weight), parameter(layer, projection_bias), a.middle);
  k.dropout_residual_forward(dropout(DropoutSite::attention_residual, layer, model_.residual_dropout), a.middle, in, a.middle);
  k.layer_norm_forward(a.middle, parameter(layer, norm2_weight), parameter(layer, norm2_bias), epsilon, a.norm2_out, a.norm2_mean,
                       a.norm2_rstd);
  k.linear_gelu_forward(a.norm2_out, parameter(layer, fc_weight), parameter(layer, fc_bias), a.fc_out, a.gelu_out);
  k.linear_forward(a.gelu_out, parameter(layer, mlp_projection_weight), parameter(layer, mlp_projection_bias), a.out);
  k.dropout_residual_forward(dropout(DropoutSite::mlp_residual, layer, model_.residual_dropout), a.out, a.middle, a.out);
}

// stream_ enters as the gradient of the block's output and leaves as that of its input: the residual path carries it through, the
// two norms add the gradient of their branch.
void GptStage::block_backward_input(int layer) {
  Kernels& k = *context_.kernels;
  const BlockActivations& a = blocks_[static_cast<std::size_t>(layer)];
  BlockGradients& g = block_gradients_;
  k.dropout_backward(dropout(DropoutSite::mlp_residual, layer, model_.residual_dropout), stream_, g.mlp_out);
  k.linear_backward_input(g.mlp_out, parameter(layer, mlp_projection_weight), g.fc_out);
  k.gelu_backward(g.fc_out, a.fc_out, g.fc_out);
  k.linear_backward_input(g.fc_out, parameter(layer, fc_weight), g.norm2_out);
  k.layer_norm_backward_input(g.norm2_out, a.middle, parameter(layer, norm2_weight), a.norm2_mean, a.norm2_rstd, stream_,
                              stream_);
  k.dropout_backward(dropout(DropoutSite::attention_residual, layer, model_.residual_dropout), stream_, g.attention_projection);
  k.linear_backward_input(g.attention_projection, parameter(layer, projection_weight), g.attention_out);
  k.attention_backward(attention_shape(), dropout(DropoutSite::attention_probability, layer, model_.attention_dropout),
                       g.attention_out, a.qkv, a.attention_out, a.logsumexp, g.qkv);
  k.linear_backward_input(g.qkv, parameter(layer, qkv_weight), g.norm1_out);
  k.layer_norm_backward_input(g.norm1_out, block_input(layer), parameter(layer, norm1_weight), a.norm1_mean, a.norm1_rstd,
                              stream_, stream_);
}

void GptStage::block_backward_weight(int layer) {
  Kernels& k = *context_.kernels;
  const BlockActivations& a = blocks_[static_cast<std::size_t>(layer)];
  const BlockGradients& g = block_gradients_;
  k.linear_backward_weight(a.gelu_out, g.mlp_out, gradient(layer, mlp_projection_weight), gradient(layer, mlp_projection_bias));
  k.linear_backward_weight(a.norm2_out, g.fc_out, gradient(layer, fc_weight), gradient(layer, fc_bias));
  k.layer_norm_backward_weight(g.norm2_out, a.middle, a.norm2_mean, a.norm2_rstd, gradient(layer, norm2_weight),
                               gradient(layer, norm2_bias));
  k.linear_backward_weight(a.attention_out, g.attention_projection, gradient(layer, projection_weight),
                           gradient(layer, projection_bias));
  k.linear_backward_weight(a.norm1_out, g.qkv, gradient(layer, qkv_weight), gradient(layer, qkv_bias));
  k.layer_norm_backward_weight(g.norm1_out, block_input(layer), a.norm1_mean, a.norm1_rstd, gradient(layer, norm1_weight),
                               gradient(layer, norm1_bias));
}

void GptStage::forward_head_norm(TensorView input) {
  context_.kernels->layer_norm_forward(input, store_.parameter(final_norm_), store_.parameter(final_norm_ + 1),
                                       model_.layer_norm_epsilon, head_.norm_out, head_.mean, head_.rstd);
}

// Logits of a chunk of tokens become their own gradient and are used up at once: the whole [tokens, vocabulary] never exists.
void GptStage::head_forward() {
  Kernels& k = *context_.kernels;
  forward_head_norm(block_input(model_.layers));
  const TensorView embedding = store_.parameter(head_index());
  const std::int64_t tokens = micro_batch_.shape().tokens();
  for (std::int64_t first = 0; first < tokens; first += kLogitsChunkTokens) {
    const std::int64_t count = std::min(kLogitsChunkTokens, tokens - first);
    const TensorView input = head_.norm_out.rows(first, count);
    const TensorView logits = head_workspace_.logits.rows(0, count);
    const std::span<const std::int32_t> targets(micro_batch_.batch.targets);
    k.head_forward(input, embedding, logits);
    loss_sum_ += k.cross_entropy_forward_backward(
        logits, targets.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)), micro_batch_.loss_scale);
    k.head_backward_input(logits, embedding, head_workspace_.norm_gradient.rows(first, count));
    k.head_backward_weight(input, logits, store_.gradient(head_index()));
  }
}

void GptStage::head_backward_input() {
  context_.kernels->layer_norm_backward_input(head_workspace_.norm_gradient, block_input(model_.layers),
                                              store_.parameter(final_norm_), head_.mean, head_.rstd, {}, stream_);
}

void GptStage::head_backward_weight() {
  context_.kernels->layer_norm_backward_weight(head_workspace_.norm_gradient, block_input(model_.layers), head_.mean, head_.rstd,
                                               store_.gradient(final_norm_), store_.gradient(final_norm_ + 1));
}

double GptStage::take_loss_sum() noexcept { return std::exchange(loss_sum_, 0.0); }

double GptStage::evaluate(const Batch& batch) {
  if (batch.rows == 0) return 0.0;
  micro_batch_ = {};
  micro_batch_.batch = batch;
  training_ = false;
  const MicroBatchShape shape = micro_batch_.shape();
  const auto dtype = store_.parameter(wte_).dtype();
  const auto hold = [&](auto& target, const auto& carve, MemoryCategory category = MemoryCategory::activations) {
    Carver counter(nullptr, dtype);
    carve(counter, model_, shape);
    Arena::Buffer memory = context_.arena->allocate(counter.size_bytes(), category);
    Carver carver(memory.data(), dtype);
    target = carve(carver, model_, shape);
    return memory;
  };
  const auto stream = [](Carver& carver, const GptConfig& model, MicroBatchShape s) {
    return carver.take({s.tokens(), model.hidden});
  };
  embedding_memory_ = hold(embedding_out_, stream);
  embedding_forward();
  // A block needs only the one before it.
  for (int layer = 0; layer < model_.layers; ++layer) {
    block_memory_[static_cast<std::size_t>(layer)] = hold(blocks_[static_cast<std::size_t>(layer)], carve_block);
    block_forward(layer);
    if (layer > 0) block_memory_[static_cast<std::size_t>(layer - 1)].release();
  }
  head_memory_ = hold(head_, carve_head);
  head_workspace_memory_ = hold(head_workspace_, carve_head_workspace, MemoryCategory::workspace);
  forward_head_norm(block_input(model_.layers));
  double sum = 0;
  for (std::int64_t first = 0; first < shape.tokens(); first += kLogitsChunkTokens) {
    const std::int64_t count = std::min(kLogitsChunkTokens, shape.tokens() - first);
    const TensorView logits = head_workspace_.logits.rows(0, count);
    const std::span<const std::int32_t> targets(batch.targets);
    context_.kernels->head_forward(head_.norm_out.rows(first, count), store_.parameter(head_index()), logits);
    sum += context_.kernels->cross_entropy_forward(
        logits, targets.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
  }
  for (Arena::Buffer* memory : {&embedding_memory_, &head_memory_, &head_workspace_memory_, &block_memory_.back()})
    memory->release();
  training_ = true;
  return sum;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/lower.h"

#include <vector>

#include "core/batch.h"
#include "optimized/data_parallel/buckets.h"
#include "optimized/engine/layout.h"

namespace tandem {
namespace {

// FLOPs of one forward pass of a part; backward_input and backward_weight repeat its matrix products once each, but the two
// products of attention scores and values have no weights: their four backward products all belong to backward_input.
struct PartFlops {
  double products = 0;
  double attention = 0;
};

PartFlops block_flops(const GptConfig& model, MicroBatchShape shape) {
  const auto tokens = static_cast<double>(shape.tokens());
  const auto hidden = static_cast<double>(model.hidden);
  const auto width = static_cast<double>(model.mlp_width());
  const auto sequence = static_cast<double>(shape.sequence);
  return {2 * tokens * hidden * (4 * hidden + 2 * width), 2 * tokens * hidden * (sequence + 1)};
}

class Lowering {
 public:
  Lowering(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, int data_rank)
      : plan_(plan), model_(model), sequence_(sequence), data_rank_(data_rank) {}

  StepProgram run() {
    communicate_scalar();  // valid tokens of the global batch: the normaliser of the loss
    for (int micro_batch = 0; micro_batch < plan_.batch.micro_batches; ++micro_batch) one_micro_batch(micro_batch);
    reduce_gradients();
    Operation norm;
    norm.kind = OpKind::gradient_norm;
    norm.after = gradients_ready_;
    const OperationId norm_id = push(std::move(norm));
    Operation optimizer;
    optimizer.kind = OpKind::optimizer;
    optimizer.after = {norm_id};
    push(std::move(optimizer));
    communicate_scalar();  // loss
    return std::move(program_);
  }

 private:
  OperationId push(Operation op) {
    program_.push_back(std::move(op));
    return static_cast<OperationId>(program_.size()) - 1;
  }

  // Everything in one micro-batch is a chain: each operation waits for the one before.
  OperationId chain(Operation op) {
    if (!program_.empty()) op.after = {static_cast<OperationId>(program_.size()) - 1};
    return push(std::move(op));
  }

  OperationId compute(Phase phase, Part part, int layer, double flops) {
    Operation op;
    op.phase = phase;
    op.part = part;
    op.layer = layer;
    op.micro_batch = micro_batch_;
    op.flops = flops;
    return chain(std::move(op));
  }

  void memory(OpKind kind, MemoryCategory category, Part part, int layer, std::int64_t bytes) {
    Operation op;
    op.kind = kind;
    op.category = category;
    op.part = part;
    op.layer = layer;
    op.micro_batch = micro_batch_;
    op.bytes = bytes;
    chain(std::move(op));
  }

  void communicate_scalar() {
    if (plan_.parallel.data == 1) return;
    Operation op;
    op.kind = OpKind::communicate;
    op.bytes = sizeof(double);
    chain(std::move(op));
  }

  template <class Carve>
  std::int64_t bytes_of(const Carve& carve) const {
    Carver counter(nullptr, plan_.numerics.storage);
    carve(counter, model_, shape_);
    return counter.size_bytes();
  }

  void one_micro_batch(int micro_batch) {
    micro_batch_ = micro_batch;
    shape_ = {micro_batch_rows(plan_.batch.rows, plan_.parallel.data, data_rank_, plan_.batch.micro_batches, micro_batch).size(),
              sequence_};
    forward();
    backward();
  }

  void forward() {
    const PartFlops block = block_flops(model_, shape_);
    memory(OpKind::allocate, MemoryCategory::activations, Part::embedding, -1, stream_bytes());
    compute(Phase::forward, Part::embedding, -1, 0);
    for (int layer = 0; layer < model_.layers; ++layer) {
      memory(OpKind::allocate, MemoryCategory::activations, Part::block, layer, bytes_of(carve_block));
      compute(Phase::forward, Part::block, layer, block.products + block.attention);
    }
  }

  void backward() {
    const PartFlops block = block_flops(model_, shape_);
    const double head = 2.0 * static_cast<double>(shape_.tokens() * model_.hidden * model_.vocabulary);
    memory(OpKind::allocate, MemoryCategory::activations, Part::head, -1, bytes_of(carve_head));
    memory(OpKind::allocate, MemoryCategory::workspace, Part::embedding, -1, stream_bytes());
    memory(OpKind::allocate, MemoryCategory::workspace, Part::head, -1, bytes_of(carve_head_workspace));
    compute(Phase::forward, Part::head, -1, 3 * head);
    compute(Phase::backward_input, Part::head, -1, 0);
    head_weight_ = compute(Phase::backward_weight, Part::head, -1, 0);
    memory(OpKind::free, MemoryCategory::workspace, Part::head, -1, bytes_of(carve_head_workspace));
    memory(OpKind::free, MemoryCategory::activations, Part::head, -1, bytes_of(carve_head));
    block_weight_.assign(static_cast<std::size_t>(model_.layers), -1);
    for (int layer = model_.layers - 1; layer >= 0; --layer) {
      memory(OpKind::allocate, MemoryCategory::workspace, Part::block, layer, bytes_of(carve_block_gradients));
      compute(Phase::backward_input, Part::block, layer, block.products + 2 * block.attention);
      block_weight_[static_cast<std::size_t>(layer)] = compute(Phase::backward_weight, Part::block, layer, block.products);
      memory(OpKind::free, MemoryCategory::workspace, Part::block, layer, bytes_of(carve_block_gradients));
      memory(OpKind::free, MemoryCategory::activations, Part::block, layer, bytes_of(carve_block));
    }
    embedding_weight_ = compute(Phase::backward_weight, Part::embedding, -1, 0);
    memory(OpKind::free, MemoryCategory::workspace, Part::embedding, -1, stream_bytes());
    memory(OpKind::free, MemoryCategory::activations, Part::embedding, -1, stream_bytes());
  }

  [[nodiscard]] std::int64_t stream_bytes() const {
    Carver counter(nullptr, plan_.numerics.storage);
    counter.take({shape_.tokens(), model_.hidden});
    return counter.size_bytes();
  }

  // The operation after which the gradient of a parameter is complete on this rank. A tied wte waits for the embedding, which
  // runs last: the head has added its part long before.
  [[nodiscard]] OperationId ready_after(const ParameterSpec& parameter) const {
    if (parameter.layer >= 0) return block_weight_[static_cast<std::size_t>(parameter.layer)];
    const bool embedding =
        parameter.kind == ParameterKind::token_embedding || parameter.kind == ParameterKind::position_embedding;
    return embedding ? embedding_weight_ : head_weight_;
  }

  void reduce_gradients() {
    gradients_ready_ = {static_cast<OperationId>(program_.size()) - 1};
    if (plan_.parallel.data == 1) return;
    const std::vector<ParameterSpec> parameters = gpt_parameters(model_);
    const auto wire_bytes = static_cast<std::int64_t>(size_bytes(plan_.numerics.reduce));
    const auto element_bytes = static_cast<std::int64_t>(size_bytes(plan_.numerics.accumulate));
    const std::vector<GradientBucket> buckets = gradient_buckets(parameters, plan_.buckets.bucket_bytes, element_bytes);
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      Operation op;
      op.kind = OpKind::communicate;
      op.purpose = Purpose::gradient;
      op.bucket = static_cast<int>(i);
      op.bytes = buckets[i].elements.size() * wire_bytes;
      OperationId ready = 0;
      for (std::int64_t p = buckets[i].parameters.begin; p < buckets[i].parameters.end; ++p) {
        ready = std::max(ready, ready_after(parameters[static_cast<std::size_t>(p)]));
      }
      op.after = {ready};
      gradients_ready_.push_back(push(std::move(op)));
    }
  }

  const TrainingPlan& plan_;
  const GptConfig& model_;
  std::int64_t sequence_;
  int data_rank_;
  int micro_batch_ = 0;
  MicroBatchShape shape_;
  StepProgram program_;
  OperationId head_weight_ = -1, embedding_weight_ = -1;
  std::vector<OperationId> block_weight_, gradients_ready_;
};

}  // namespace

StepProgram lower(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, int data_rank) {
  return Lowering(plan, model, sequence, data_rank).run();
}

ProgramExpectation expectation(const TrainingPlan& plan, const GptConfig& model) {
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(plan.numerics.accumulate));
  const bool reduces = plan.parallel.data > 1;
  const auto buckets = gradient_buckets(gpt_parameters(model), plan.buckets.bucket_bytes, element_bytes).size();
  return {model.layers, plan.batch.micro_batches, static_cast<int>(buckets), reduces};
}

}  // namespace tandem

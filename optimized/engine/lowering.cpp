// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/lowering.h"

#include <utility>

#include "optimized/data_parallel/buckets.h"
#include "optimized/loss_scaling/fp8.h"
#include "optimized/zero/ownership.h"

namespace tandem {
namespace {

// What every pipeline rank does in which order. An evaluation sends one micro-batch after the other through all chunks.
std::vector<std::vector<PipelineSlot>> slots_of_all(const TrainingPlan& plan, Lowering::Kind kind) {
  std::vector<std::vector<PipelineSlot>> slots;
  for (int p = 0; p < plan.parallel.pipeline; ++p) {
    if (kind == Lowering::Kind::training_step) {
      slots.push_back(pipeline_order(plan.pipeline, plan.parallel.pipeline, p, plan.batch.micro_batches));
      continue;
    }
    slots.emplace_back();
    for (int micro_batch = 0; micro_batch < plan.batch.micro_batches; ++micro_batch) {
      for (int chunk = 0; chunk < plan.pipeline.chunks; ++chunk) slots.back().push_back({SlotKind::forward, chunk, micro_batch});
    }
  }
  return slots;
}

}  // namespace

Lowering::Lowering(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, int rank, const PitfallSet& pitfalls,
                   Kind kind)
    : plan_(plan),
      pitfalls_(pitfalls),
      grid_(plan),
      here_(grid_.coordinates(rank)),
      local_(local_model(model, plan, grid_, rank)),
      stages_(pipeline_layout(plan, model)),
      sequence_(sequence),
      rank_(rank),
      kind_(kind),
      slots_(slots_of_all(plan, kind)),
      messages_(stages_, slots_, here_.pipeline, pitfalls.on(Pitfall::messages_without_envelope)),
      parameters_(local_parameters(model, plan, grid_, rank)),
      units_(find_units()) {}

Lowering::Pass Lowering::pass_of(Phase phase, int chunk, int micro_batch) const {
  return {phase, chunk, micro_batch, stages_.stage_of(here_.pipeline, chunk),
          micro_batch_shape(local_, plan_.batch, sequence_, micro_batch)};
}

OperationId Lowering::push(Operation op) {
  // A rank's operations are a chain: each waits for the one before.
  if (!program_.empty()) op.after = {static_cast<OperationId>(program_.size()) - 1};
  program_.push_back(std::move(op));
  return static_cast<OperationId>(program_.size()) - 1;
}

StepProgram Lowering::program() {
  kind_ == Kind::training_step ? training_step() : evaluation();
  return std::move(program_);
}

void Lowering::training_step() {
  scalars(1);  // valid tokens of the global batch: the normaliser of the loss
  for (const PipelineSlot& next : slots_[static_cast<std::size_t>(here_.pipeline)]) slot(next);
  release_sent();
  reduce_gradients();
  finish_step();
}

void Lowering::evaluation() {
  for (const PipelineSlot& next : slots_[static_cast<std::size_t>(here_.pipeline)]) {
    forward(pass_of(Phase::forward, next.chunk, next.micro_batch), true);
  }
  scalars(2);  // losses and valid tokens
}

void Lowering::slot(const PipelineSlot& slot) {
  switch (slot.kind) {
    case SlotKind::forward: forward(pass_of(Phase::forward, slot.chunk, slot.micro_batch), false); break;
    case SlotKind::backward: backward_input(pass_of(Phase::backward_input, slot.chunk, slot.micro_batch), true); break;
    case SlotKind::backward_input: backward_input(pass_of(Phase::backward_input, slot.chunk, slot.micro_batch), false); break;
    case SlotKind::backward_weight: {
      const Pass pass = pass_of(Phase::backward_weight, slot.chunk, slot.micro_batch);
      const Interval layers = layers_of(pass);
      for (auto layer = static_cast<int>(layers.end) - 1; layer >= layers.begin; --layer) {
        backward_weight(pass, layer);
        free_layer(pass, layer);
      }
      free_chunk(pass);
      break;
    }
  }
}

void Lowering::scalars(std::int64_t count) {
  if (grid_.size() == 1) return;
  Operation op;
  op.kind = OpKind::communicate;
  op.axis = GroupAxis::world;
  op.part = Part::message;
  op.bytes = count * static_cast<std::int64_t>(sizeof(double));
  push(std::move(op));
}

void Lowering::reduce_gradients() {
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(plan_.numerics.accumulate));
  const auto reduce = [&](GroupAxis axis, int bucket, std::int64_t bytes, Collective collective) {
    if (grid_.group(axis, rank_).size() == 1 || bytes == 0) return;
    Operation op;
    op.kind = OpKind::communicate;
    op.collective = collective;
    op.axis = axis;
    op.purpose = Purpose::gradient;
    op.bucket = bucket;
    op.bytes = bytes;
    push(std::move(op));
  };
  // What this rank keeps when the passes are done: everything, or with ZeRO stages 2 and 3 its parts.
  std::int64_t partial = 0;
  std::int64_t tied = 0;
  std::int64_t begin = 0;
  const Ownership owned = ownership(parameters_, plan_, grid_, rank_);
  for (const LocalParameter& parameter : parameters_) {
    const Interval elements = {begin, begin + parameter.num_elements()};
    const std::int64_t kept = plan_.zero_stage >= 2 ? owned.kept(elements) : elements.size();
    begin = elements.end;
    if (parameter.tensor_partial_gradient) partial += kept * element_bytes;
    if (parameter.tied_copy) tied += kept * element_bytes;
  }
  reduce(GroupAxis::tensor, kTensorPartialGradients, partial, Collective::all_reduce);
  reduce(GroupAxis::embedding, kTiedEmbeddingGradient, tied, Collective::all_reduce);
  if (plan_.zero_stage >= 2) return;
  const auto wire_bytes = static_cast<std::int64_t>(size_bytes(plan_.numerics.reduce));
  const std::vector<GradientBucket> buckets = buckets_of(plan_, parameters_);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    reduce(buckets[i].axis(), static_cast<int>(i), buckets[i].elements.size() * wire_bytes,
           plan_.zero_stage == 1 ? Collective::reduce_scatter : Collective::all_reduce);
  }
}

void Lowering::sum_of_scalars(GroupAxis axis, std::int64_t count) {
  if (count == 0 || grid_.group(axis, rank_).size() == 1) return;
  Operation sum;
  sum.kind = OpKind::communicate;
  sum.axis = axis;
  sum.part = Part::message;
  sum.bytes = count * static_cast<std::int64_t>(sizeof(double));
  push(std::move(sum));
}

void Lowering::finish_step() {
  Operation norm;
  norm.kind = OpKind::gradient_norm;
  push(std::move(norm));
  norm_partials();
  sum_of_scalars(GroupAxis::model, 1);
  if (scales_loss(plan_)) scalars(1);  // whether any rank has a gradient that is not finite
  Operation optimizer;
  optimizer.kind = OpKind::optimizer;
  push(std::move(optimizer));
  update_gathers();
  scalars(local_.model.experts > 0 ? 4 : 1);  // loss; with experts also the auxiliary loss, kept and dropped assignments
  if (plan_.numerics.fp8) scalars(kFp8SlotsOfLayer * local_.model.layers);  // largest magnitudes of fp8 operands
}

}  // namespace tandem

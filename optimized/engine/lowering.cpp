// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/lowering.h"

#include <algorithm>
#include <utility>

#include "optimized/data_parallel/buckets.h"
#include "optimized/data_parallel/compressed_sync.h"
#include "optimized/engine/gradient_sources.h"
#include "optimized/engine/insert_behind.h"
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

std::array<int, kGroupAxes> group_sizes(const ProcessGrid& grid, int rank) {
  std::array<int, kGroupAxes> sizes{};
  for (std::size_t axis = 0; axis < kGroupAxes; ++axis) {
    sizes[axis] = static_cast<int>(grid.group(static_cast<GroupAxis>(axis), rank).size());
  }
  return sizes;
}

}  // namespace

Lowering::Lowering(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, int rank, const PitfallSet& pitfalls,
                   Kind kind)
    : plan_(plan),
      pitfalls_(pitfalls),
      grid_(plan),
      group_sizes_(group_sizes(grid_, rank)),
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
  // A rank's operations are a chain: each waits for the one before, but for those that go on in the background.
  if (last_foreground_ >= 0) op.after.push_back(last_foreground_);
  if (op.kind == OpKind::compute) {
    const std::vector<OperationId> gathers = take_gathers(op.layer);
    op.after.insert(op.after.end(), gathers.begin(), gathers.end());
  }
  const auto id = static_cast<OperationId>(program_.size());
  if (!op.background) last_foreground_ = id;
  program_.push_back(std::move(op));
  return id;
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
  free_scattered();
  if (plan_.zero_stage < 2) reduce_buckets();
  sums_of_copies();
}

void Lowering::reduce_buckets() {
  const auto wire_bytes = static_cast<std::int64_t>(size_bytes(plan_.numerics.reduce));
  const std::vector<GradientBucket> buckets = buckets_of(plan_, parameters_);
  std::vector<Insertion> early;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    if (group_size(buckets[i].axis()) == 1) continue;
    Operation op;
    op.kind = OpKind::communicate;
    op.collective = plan_.zero_stage == 1 ? Collective::reduce_scatter : Collective::all_reduce;
    op.axis = buckets[i].axis();
    op.purpose = Purpose::gradient;
    op.bucket = static_cast<int>(i);
    op.bytes = buckets[i].elements.size() * wire_bytes;
    if (plan_.compression.codec != "none") {
      op.bytes = compressed_bucket_bytes(plan_.compression, parameters_, buckets[i], group_size(op.axis));
    }
    if (!plan_.overlap.gradients) {
      push(std::move(op));
      continue;
    }
    op.background = true;
    const OperationId behind = last_contribution(buckets[i]);
    op.after = {behind};
    early.push_back({behind, std::move(op)});
  }
  if (early.empty()) return;
  Inserted result = insert_behind(std::move(program_), std::move(early));
  program_ = std::move(result.program);
  reducing_ = std::move(result.inserted);
  last_foreground_ = result.moved_to[static_cast<std::size_t>(last_foreground_)];
}

// The last operation that adds to one of the bucket's gradients.
OperationId Lowering::last_contribution(const GradientBucket& bucket) const {
  std::vector<int> sources;
  for (std::int64_t p = bucket.parameters.begin; p < bucket.parameters.end; ++p) {
    const bool head = stages_.holds_head(here_.pipeline) && local_.model.tied;
    const std::vector<int> more =
        gradient_sources(parameters_[static_cast<std::size_t>(p)], stages_.holds_embedding(here_.pipeline), head);
    sources.insert(sources.end(), more.begin(), more.end());
  }
  // Planted: the one before the last, when the bucket is as good as full.
  int passed_over = pitfalls_.on(Pitfall::bucket_sent_before_filled) ? 1 : 0;
  for (auto id = static_cast<OperationId>(program_.size()) - 1; id >= 0; --id) {
    const Operation& op = program_[static_cast<std::size_t>(id)];
    const bool adds = std::any_of(sources.begin(), sources.end(), [&](int source) { return adds_to(op, source); });
    if (adds && passed_over-- == 0) return id;
  }
  return last_foreground_;
}

// Over the ranks that hold copies of a parameter, each with the gradient of its own use of it: sums of what this rank keeps when
// its buckets are reduced, everything, or with ZeRO its parts.
void Lowering::sums_of_copies() {
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(plan_.numerics.accumulate));
  std::int64_t partial = 0;
  std::int64_t tied = 0;
  std::int64_t begin = 0;
  const Ownership owned = ownership(parameters_, plan_, grid_, rank_);
  for (const LocalParameter& parameter : parameters_) {
    const Interval elements = {begin, begin + parameter.num_elements()};
    const std::int64_t kept = plan_.zero_stage >= 1 ? owned.kept(elements) : elements.size();
    begin = elements.end;
    if (parameter.tensor_partial_gradient) partial += kept * element_bytes;
    if (parameter.tied_copy) tied += kept * element_bytes;
  }
  const auto reduce = [&](GroupAxis axis, int bucket, std::int64_t bytes) {
    if (group_size(axis) == 1 || bytes == 0) return;
    Operation op;
    op.kind = OpKind::communicate;
    op.axis = axis;
    op.purpose = Purpose::gradient;
    op.bucket = bucket;
    op.bytes = bytes;
    op.after = std::exchange(reducing_, {});
    push(std::move(op));
  };
  reduce(GroupAxis::tensor, kTensorPartialGradients, partial);
  reduce(GroupAxis::embedding, kTiedEmbeddingGradient, tied);
}

void Lowering::sum_of_scalars(GroupAxis axis, std::int64_t count) {
  if (count == 0 || group_size(axis) == 1) return;
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
  norm.after = std::exchange(reducing_, {});
  std::vector<OperationId> forgotten;
  if (pitfalls_.on(Pitfall::wait_missing_before_norm) && !norm.after.empty()) {
    forgotten.push_back(norm.after.back());
    norm.after.pop_back();
  }
  push(std::move(norm));
  norm_partials();
  sum_of_scalars(GroupAxis::model, 1);
  if (scales_loss(plan_)) scalars(1);  // whether any rank has a gradient that is not finite
  Operation optimizer;
  optimizer.kind = OpKind::optimizer;
  optimizer.after = std::move(forgotten);
  push(std::move(optimizer));
  update_gathers();
  scalars(local_.model.experts > 0 ? 4 : 1);  // loss; with experts also the auxiliary loss, kept and dropped assignments
  if (plan_.numerics.fp8) scalars(kFp8SlotsOfLayer * local_.model.layers);  // largest magnitudes of fp8 operands
}

}  // namespace tandem

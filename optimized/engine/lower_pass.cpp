// SPDX-License-Identifier: Apache-2.0
// Forward and backward passes of one chunk over one micro-batch, as operations.
#include <algorithm>
#include <utility>

#include "optimized/engine/lowering.h"

namespace tandem {
namespace {

double product(std::int64_t rows, std::int64_t in, std::int64_t out) {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(in) * static_cast<double>(out);
}

// Of one of the two products of attention: queries with keys, probabilities with values.
double attention_product(const LocalModel& local, const MicroBatchShape& shape, int origin) {
  return product(shape.rows * visible_pairs(local, shape.row_tokens, origin), local.attention_width(), 1);
}

double mlp_flops(const LocalModel& local, const MicroBatchShape& shape) {
  const std::int64_t rows = local.model.experts == 0 ? shape.tokens() : local.experts() * expert_slots(local, shape).received;
  return 2 * product(rows, local.model.hidden, local.mlp_width());
}

double router_flops(const LocalModel& local, const MicroBatchShape& shape) {
  return product(shape.tokens(), local.model.hidden, local.model.experts);
}

}  // namespace

double Lowering::attention_core_flops(const Pass& pass) const {
  return 2 * attention_product(local_, pass.shape, ring_origin(local_, 0));
}

Operation Lowering::operation(OpKind kind, const Pass& pass, Part part, int layer) {
  Operation op;
  op.kind = kind;
  op.phase = pass.phase;
  op.part = part;
  op.layer = layer;
  op.micro_batch = pass.micro_batch;
  op.chunk = pass.chunk;
  return op;
}

void Lowering::compute(const Pass& pass, Part part, int layer, double flops, int piece) {
  Operation op = operation(OpKind::compute, pass, part, layer);
  op.piece = piece;
  op.flops = flops;
  op.after = std::exchange(pieces_, std::exchange(late_pieces_, {}));
  push(std::move(op));
}

void Lowering::communicate(const Pass& pass, Collective collective, GroupAxis axis, Part part, int layer, std::int64_t elements,
                           int piece, Timing timing) {
  if (group_size(axis) == 1) return;
  Operation op = operation(OpKind::communicate, pass, part, layer);
  op.collective = collective;
  op.axis = axis;
  op.purpose = Purpose::activation;
  op.piece = piece;
  op.background = timing == Timing::background;
  op.bytes = elements * static_cast<std::int64_t>(size_bytes(plan_.numerics.storage));
  push(std::move(op));
}

void Lowering::memory(OpKind kind, const Pass& pass, MemoryCategory category, Part part, int layer, std::int64_t bytes,
                      int stage) {
  Operation op = operation(kind, pass, part, layer);
  op.category = category;
  op.stage = stage;
  op.bytes = bytes;
  push(std::move(op));
}

std::int64_t Lowering::workspace_bytes(const Pass& pass) const {
  Carver counter(nullptr, plan_.numerics.storage);
  carve_pass_workspace(counter, local_, pass.shape, pass.phase == Phase::forward || pass.phase == Phase::recompute);
  return counter.size_bytes();
}

// Receives what `pass` works on, and before it whatever the same neighbour sent earlier.
void Lowering::receive_for(const Pass& pass) {
  const bool backward = pass.phase != Phase::forward;
  for (const auto& [message, from] : messages_.receive_until({backward, pass.stage, pass.micro_batch})) {
    const Pass entered = pass_of(pass.phase, stages_.chunk_of_stage(message.stage), message.micro_batch);
    Pass receiving = entered;
    receiving.phase = message.backward ? Phase::backward_input : Phase::forward;
    memory(OpKind::allocate, receiving, message.backward ? MemoryCategory::workspace : MemoryCategory::activations, Part::message,
           -1, bytes_of(carve_stream, receiving), message.stage);
    Coordinates peer = here_;
    peer.pipeline = from;
    communicate(receiving, Collective::recv, GroupAxis::pipeline, Part::message, -1,
                token_slice(local_, receiving.shape).size() * local_.model.hidden);
    program_.back().peer = grid_.rank_of(peer);
    program_.back().stage = message.stage;
  }
}

void Lowering::send_on(const Pass& pass) {
  const bool backward = pass.phase != Phase::forward;
  const int next = pass.stage + (backward ? -1 : 1);
  Coordinates peer = here_;
  peer.pipeline = stages_.rank_of_stage(next);
  communicate(pass, Collective::send, GroupAxis::pipeline, Part::message, -1,
              token_slice(local_, pass.shape).size() * local_.model.hidden);
  program_.back().peer = grid_.rank_of(peer);
  program_.back().stage = next;
}

void Lowering::release_sent() {
  for (Operation& op : sent_) push(std::move(op));
  sent_.clear();
}

void Lowering::forward(const Pass& pass, bool evaluation) {
  if (!is_first(pass)) is_here(pass.stage - 1) ? take_over(pass) : receive_for(pass);
  memory(OpKind::allocate, pass, MemoryCategory::workspace, Part::block, -1, workspace_bytes(pass));
  if (is_first(pass)) forward_embedding(pass);
  const Interval layers = layers_of(pass);
  for (auto layer = static_cast<int>(layers.begin); layer < layers.end; ++layer) {
    gather_layer(pass, layer);
    if (layer + 1 < layers.end) gather_ahead(pass, layer + 1);
    forward_block(pass, layer);
    release_layer(pass, layer);
    free_what_is_recomputed(pass, layer);
    // A block of an evaluation needs only the one before.
    if (evaluation && layer > layers.begin) free_kept(pass, layer - 1);
  }
  memory(OpKind::free, pass, MemoryCategory::workspace, Part::block, -1, workspace_bytes(pass));
  if (is_last(pass)) {
    forward_head(pass, evaluation);
  } else if (!is_here(pass.stage + 1)) {
    send_on(pass);
  }
  if (!evaluation) return;
  // A stage of this rank that takes this output over does so in its own pass, which frees it.
  if (is_last(pass) || !is_here(pass.stage + 1)) free_kept(pass, static_cast<int>(layers.end) - 1);
  if (!is_first(pass) && is_here(pass.stage - 1)) {
    const Pass before = pass_of(Phase::forward, stages_.chunk_of_stage(pass.stage - 1), pass.micro_batch);
    free_kept(before, static_cast<int>(layers_of(before).end) - 1);
  }
  free_chunk(pass);
}

void Lowering::forward_block(const Pass& pass, int layer) {
  allocate_block(pass, layer, true, true);
  attention_forward(pass, layer);
  forward_mlp(pass, layer);
  compute(pass, Part::mlp_merge, layer, 0);
}

// Up to the second norm.
void Lowering::attention_forward(const Pass& pass, int layer) {
  const std::int64_t tokens = pass.shape.tokens();
  const std::int64_t hidden = local_.model.hidden;
  const std::int64_t width = local_.attention_width();
  compute(pass, Part::norm_1, layer, 0);
  gather_slices(pass, Part::norm_1, layer);
  compute(pass, Part::attention_in, layer, product(tokens, hidden, 3 * width));
  for (int step = 0; step < local_.context_ranks; ++step) {
    const int origin = ring_origin(local_, step);
    compute(pass, Part::attention_core, layer, 2 * attention_product(local_, pass.shape, origin), step);
    if (step + 1 == local_.context_ranks) break;
    communicate(pass, Collective::ring_shift, GroupAxis::context, Part::attention_core, layer,
                ring_elements(local_, pass.shape, origin), step);
  }
  summed_product(pass, Part::attention_out, layer, product(tokens, width, hidden));
  compute(pass, Part::attention_merge, layer, 0);
  compute(pass, Part::norm_2, layer, 0);
  gather_slices(pass, Part::norm_2, layer);
}

void Lowering::forward_mlp(const Pass& pass, int layer) {
  const GptConfig& model = local_.model;
  // The block's output may have been kept: then what leads to it alone is left out.
  const bool to_the_end = pass.phase == Phase::forward || !storage_of(pass, layer).out;
  if (model.experts == 0) {
    if (to_the_end) {
      summed_product(pass, Part::mlp, layer, mlp_flops(local_, pass.shape));
    } else {
      compute(pass, Part::mlp, layer, mlp_flops(local_, pass.shape) / 2);
    }
    return;
  }
  compute(pass, Part::router, layer, router_flops(local_, pass.shape));
  // Choices of whole rows decide which tokens an expert has room for.
  if (local_.context_ranks > 1) {
    communicate(pass, Collective::all_gather, GroupAxis::context, Part::router, layer, 0);
    program_.back().bytes =
        pass.shape.rows * pass.shape.row_tokens * model.expert_choices * static_cast<std::int64_t>(sizeof(int));
  }
  const std::int64_t sent = model.experts * expert_slots(local_, pass.shape).own * model.hidden;
  const std::int64_t returned = local_.experts() * expert_slots(local_, pass.shape).received * model.hidden;
  compute(pass, Part::dispatch, layer, 0);
  communicate(pass, Collective::all_to_all, GroupAxis::expert, Part::dispatch, layer, sent);
  compute(pass, Part::experts, layer, mlp_flops(local_, pass.shape));
  communicate(pass, Collective::all_to_all, GroupAxis::expert, Part::experts, layer, returned);
  if (!to_the_end) return;
  compute(pass, Part::combine, layer, 0);
  sum_over_tensor_ranks(pass, Part::combine, layer);
}

void Lowering::forward_head(const Pass& pass, bool evaluation) {
  memory(OpKind::allocate, pass, MemoryCategory::activations, Part::head_norm, -1, bytes_of(carve_head, pass));
  memory(OpKind::allocate, pass, MemoryCategory::workspace, Part::head_loss, -1, bytes_of(carve_head_gradient, pass));
  memory(OpKind::allocate, pass, MemoryCategory::workspace, Part::head_logits, -1, bytes_of(carve_head_workspace, pass));
  gather(pass, units_.final_norm);
  gather(pass, units_.head);
  if (!evaluation) open_gradients(pass, units_.head, units_.head == units_.token_table && is_here(0) ? 2 : 1);
  compute(pass, Part::head_norm, -1, 0);
  gather_slices(pass, Part::head_norm, -1);
  for (int piece = 0; piece < head_pieces(pass.shape); ++piece) {
    const std::int64_t tokens = head_piece(pass.shape, piece).size();
    const double logits = product(tokens, local_.model.hidden, local_.vocabulary_rows());
    compute(pass, Part::head_logits, -1, logits, piece);
    communicate(pass, Collective::all_gather, GroupAxis::tensor, Part::head_logits, -1, 0, piece);
    if (local_.tensor_ranks > 1) {
      program_.back().bytes =
          local_.tensor_ranks * tokens * 3 * static_cast<std::int64_t>(size_bytes(wide(plan_.numerics.storage)));
    }
    compute(pass, Part::head_loss, -1, evaluation ? 0 : 2 * logits, piece);
  }
  release(pass, units_.final_norm);
  release(pass, units_.head);
  if (!evaluation) close_gradients(pass, units_.head);
  memory(OpKind::free, pass, MemoryCategory::workspace, Part::head_logits, -1, bytes_of(carve_head_workspace, pass));
  if (!evaluation) {
    sum_over_tensor_ranks(pass, Part::head_loss, -1);
    return;
  }
  memory(OpKind::free, pass, MemoryCategory::workspace, Part::head_loss, -1, bytes_of(carve_head_gradient, pass));
  memory(OpKind::free, pass, MemoryCategory::activations, Part::head_norm, -1, bytes_of(carve_head, pass));
}

void Lowering::backward_input(const Pass& pass, bool with_weights) {
  release_sent();
  Pass forward = pass;
  forward.phase = Phase::forward;
  if (is_last(pass)) {
    memory(OpKind::allocate, pass, MemoryCategory::workspace, Part::message, -1, bytes_of(carve_stream, pass), pass.stage);
    gather(pass, units_.final_norm);
    compute(pass, Part::head_norm, -1, 0);
    release(pass, units_.final_norm);
    Pass weight = pass;
    weight.phase = Phase::backward_weight;
    open_gradients(weight, units_.final_norm, 1);
    compute(weight, Part::head_norm, -1, 0);
    close_gradients(weight, units_.final_norm);
    memory(OpKind::free, forward, MemoryCategory::workspace, Part::head_loss, -1, bytes_of(carve_head_gradient, pass));
    memory(OpKind::free, forward, MemoryCategory::activations, Part::head_norm, -1, bytes_of(carve_head, pass));
  } else if (!is_here(pass.stage + 1)) {
    receive_for(pass);
  }
  memory(OpKind::allocate, pass, MemoryCategory::workspace, Part::block, -1, workspace_bytes(pass));
  const Interval layers = layers_of(pass);
  for (auto layer = static_cast<int>(layers.end) - 1; layer >= layers.begin; --layer) {
    gather_layer(pass, layer);
    if (layer > layers.begin) gather_ahead(pass, layer - 1);
    recompute_before(pass, layer);
    memory(OpKind::allocate, forward, MemoryCategory::workspace, Part::block, layer, bytes_of(carve_block_gradients, pass));
    backward_block(pass, layer);
    release_layer(pass, layer);
    if (!with_weights) continue;
    backward_weight(pass, layer);
    free_layer(pass, layer);
  }
  memory(OpKind::free, pass, MemoryCategory::workspace, Part::block, -1, workspace_bytes(pass));
  // The gradient of this stage's output has become that of its input in the same memory.
  int allocated_for = pass.stage;
  while (allocated_for + 1 < stages_.stages() && is_here(allocated_for + 1)) ++allocated_for;
  Operation release;
  release.kind = OpKind::free;
  release.phase = pass.phase;
  release.category = MemoryCategory::workspace;
  release.part = Part::message;
  release.micro_batch = pass.micro_batch;
  release.chunk = stages_.chunk_of_stage(allocated_for);
  release.stage = allocated_for;
  release.bytes = bytes_of(carve_stream, pass);
  if (is_first(pass)) {
    backward_embedding(pass);
    push(release);
  } else if (!is_here(pass.stage - 1)) {
    send_on(pass);
    sent_.push_back(release);
  }
  if (with_weights) free_chunk(pass);
}

void Lowering::backward_block(const Pass& pass, int layer) {
  const std::int64_t tokens = pass.shape.tokens();
  const std::int64_t hidden = local_.model.hidden;
  const std::int64_t width = local_.attention_width();
  compute(pass, Part::mlp_merge, layer, 0);
  gather_slices(pass, Part::mlp_merge, layer);
  backward_mlp(pass, layer);
  compute(pass, Part::norm_2, layer, 0);
  compute(pass, Part::attention_merge, layer, 0);
  gather_slices(pass, Part::attention_merge, layer);
  compute(pass, Part::attention_out, layer, product(tokens, width, hidden));
  for (int step = 0; step < local_.context_ranks; ++step) {
    const int origin = ring_origin(local_, step);
    compute(pass, Part::attention_core, layer, 4 * attention_product(local_, pass.shape, origin), step);
    if (local_.context_ranks == 1) break;
    // Keys and values travel with their gradients; in the last step only the gradients go home.
    const int copies = step + 1 == local_.context_ranks ? 1 : 2;
    communicate(pass, Collective::ring_shift, GroupAxis::context, Part::attention_core, layer,
                copies * ring_elements(local_, pass.shape, origin), step);
  }
  summed_product(pass, Part::attention_in, layer, product(tokens, hidden, 3 * width));
  compute(pass, Part::norm_1, layer, 0);
}

void Lowering::backward_mlp(const Pass& pass, int layer) {
  const GptConfig& model = local_.model;
  if (model.experts == 0) {
    summed_product(pass, Part::mlp, layer, mlp_flops(local_, pass.shape));
    return;
  }
  const std::int64_t sent = model.experts * expert_slots(local_, pass.shape).own * model.hidden;
  const std::int64_t returned = local_.experts() * expert_slots(local_, pass.shape).received * model.hidden;
  compute(pass, Part::combine, layer, 0);
  communicate(pass, Collective::all_to_all, GroupAxis::expert, Part::combine, layer, sent);
  compute(pass, Part::experts, layer, mlp_flops(local_, pass.shape));
  communicate(pass, Collective::all_to_all, GroupAxis::expert, Part::experts, layer, returned);
  compute(pass, Part::dispatch, layer, 0);
  compute(pass, Part::router, layer, router_flops(local_, pass.shape));
  sum_over_tensor_ranks(pass, Part::router, layer);
}

void Lowering::backward_weight(const Pass& pass, int layer) {
  const std::int64_t tokens = pass.shape.tokens();
  const std::int64_t hidden = local_.model.hidden;
  Pass weight = pass;
  weight.phase = Phase::backward_weight;
  open_gradients(weight, units_.block(layer), 1);
  open_gradients(weight, units_.experts(layer), 1);
  compute(
      weight, Part::block, layer,
      product(tokens, hidden, 4 * local_.attention_width()) + mlp_flops(local_, pass.shape) + router_flops(local_, pass.shape));
  close_gradients(weight, units_.block(layer));
  close_gradients(weight, units_.experts(layer));
}

}  // namespace tandem

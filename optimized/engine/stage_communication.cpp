// SPDX-License-Identifier: Apache-2.0
// Which tensor each communication of a step program moves.
#include <cstddef>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "optimized/engine/gpt_stage.h"

namespace tandem {

Work GptStage::do_communicate(const Operation& op) {
  const bool forward = op.phase == Phase::forward;
  // Ranks of tensor and context groups have the same rows: with none, all of them have nothing to say.
  const bool all_alike = op.axis == GroupAxis::tensor || op.axis == GroupAxis::context;
  if (all_alike && at(op.micro_batch).batch.rows == 0) return {};
  switch (op.collective) {
    case Collective::send: send_message(op); return {};
    case Collective::recv: receive_message(op); return {};
    case Collective::ring_shift: ring_shift(op); return {};
    case Collective::all_to_all: exchange_slots(op); return {};
    default: break;
  }
  const bool sp = local_.sequence_parallel;
  switch (op.part) {
    case Part::embedding_lookup:
      return sum_over_tensor_ranks(op, sp ? workspace(op).partial : embedding_out(op), embedding_out(op));
    case Part::norm_1: gather_slices(op, block(op).norm1_out); return {};
    case Part::norm_2: gather_slices(op, block(op).norm2_out); return {};
    case Part::head_norm: gather_slices(op, head(op).norm_out); return {};
    case Part::attention_out: return sum_over_tensor_ranks(op, sp ? workspace(op).partial : block(op).middle, block(op).middle);
    case Part::mlp:
    case Part::combine:
      if (forward) return sum_over_tensor_ranks(op, sp ? workspace(op).partial : block(op).out, block(op).out);
      [[fallthrough]];
    case Part::router:
      if (op.axis == GroupAxis::context) {
        exchange_choices(op);
        return {};
      }
      return sum_over_tensor_ranks(op, block_gradients(op).norm2_out, slice_of(op, block_gradients(op).norm2_out));
    case Part::mlp_merge: gather_slices(op, block_gradients(op).mlp_out); return {};
    case Part::attention_merge: gather_slices(op, block_gradients(op).attention_projection); return {};
    case Part::attention_in:
      // The input of a column-parallel layer has a gradient from every tensor rank's columns.
      if (context_.pitfalls.on(Pitfall::column_input_gradient_not_reduced)) return {};
      return sum_over_tensor_ranks(op, block_gradients(op).norm1_out, slice_of(op, block_gradients(op).norm1_out));
    case Part::head_logits: gather_statistics(op); return {};
    case Part::head_loss: return sum_over_tensor_ranks(op, head_gradient(op), slice_of(op, head_gradient(op)));
    case Part::embedding: gather_embedding_gradient(op); return {};
    default: TANDEM_CHECK(false, fmt::format("{} moves nothing", to_string(op)));
  }
  return {};
}

// slice: this rank's part of the sum under sequence parallelism; it may be a part of `full`.
Work GptStage::sum_over_tensor_ranks(const Operation& op, TensorView full, TensorView slice) {
  const int pieces = product_pieces(local_, at(op.micro_batch).shape, op.phase, op.part);
  if (pieces > 1) return sum_piece(op, pieces, slice);
  const CommOptions options{op.purpose, to_string(op), Progress::on_wait, static_cast<int>(inputs_.step)};
  Communicator& group = groups_.of(GroupAxis::tensor);
  if (!local_.sequence_parallel) {
    group.all_reduce(full, options).wait_host();
    return {};
  }
  const std::vector<std::int64_t> counts = slice_counts(local_, at(op.micro_batch).shape, model_.hidden);
  group.reduce_scatter(full.flat(), slice.flat(), counts, options).wait_host();
  return {};
}

// While it is scattered, this rank computes the next piece.
Work GptStage::sum_piece(const Operation& op, int pieces, TensorView slice) {
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const std::int64_t begin = piece_begin(local_, shape, op.piece, pieces);
  const std::int64_t end = piece_begin(local_, shape, op.piece + 1, pieces);
  const Interval own = piece_of_slice(local_, shape, local_.tensor_rank, op.piece, pieces);
  const TensorView out = slice.rows(own.begin - token_slice(local_, shape).begin, own.size());
  return groups_.of(GroupAxis::tensor)
      .reduce_scatter(workspace(op).partial.rows(begin, end - begin).flat(), out.flat(),
                      piece_counts(local_, shape, op.piece, pieces, model_.hidden),
                      {op.purpose, to_string(op), Progress::background, static_cast<int>(inputs_.step)});
}

void GptStage::gather_slices(const Operation& op, TensorView full) {
  const std::vector<std::int64_t> counts = slice_counts(local_, at(op.micro_batch).shape, model_.hidden);
  groups_.of(GroupAxis::tensor)
      .all_gather(slice_of(op, full).flat(), full.flat(), counts,
                  {op.purpose, to_string(op), Progress::on_wait, static_cast<int>(inputs_.step)})
      .wait_host();
}

void GptStage::gather_embedding_gradient(const Operation& op) {
  Carver carver(
      memory(MemoryCategory::workspace, Part::embedding_lookup, Phase::backward_input, -1, op.micro_batch, op.chunk).data(),
      dtype_);
  gather_slices(op, carve_head_gradient(carver, local_, at(op.micro_batch).shape));
}

namespace {

Envelope envelope_of(const Operation& op, const StepInputs& inputs, const PitfallSet& pitfalls) {
  if (pitfalls.on(Pitfall::messages_without_envelope)) return {};
  return {inputs.step, op.micro_batch, op.stage, op.phase == Phase::forward ? 0 : 1};
}

}  // namespace

// The pipeline communicator numbers ranks by their place in the pipeline.
void GptStage::send_message(const Operation& op) {
  const TensorView data = op.phase == Phase::forward ? chunk_output(op) : stream(op);
  // Both ends know that a micro-batch without rows has no message; several of them would share one address.
  if (data.num_elements() == 0) return;
  const CommOptions options{op.purpose, to_string(op), Progress::background, static_cast<int>(inputs_.step)};
  const int to = groups_.grid().coordinates(op.peer).pipeline;
  Work work = groups_.of(GroupAxis::pipeline).send(data, to, envelope_of(op, inputs_, context_.pitfalls), options);
  // The memory belongs to the message until it has arrived.
  if (context_.pitfalls.on(Pitfall::send_buffer_reused_early)) context_.kernels->fill(data.rows(0, (data.dim(0) + 1) / 2), 0.0);
  sending_.insert_or_assign(data.data(), std::move(work));
}

void GptStage::receive_message(const Operation& op) {
  const CommOptions options{op.purpose, to_string(op), Progress::on_wait, static_cast<int>(inputs_.step)};
  const TensorView data = message(op);
  if (data.num_elements() == 0) return;
  const int from = groups_.grid().coordinates(op.peer).pipeline;
  Work work = groups_.of(GroupAxis::pipeline).recv(data, from, envelope_of(op, inputs_, context_.pitfalls), options);
  // Planted: the stage computes with what is there before the message.
  std::vector<std::byte> early;
  Memory& lane = context_.kernels->memory();
  if (context_.pitfalls.on(Pitfall::recv_read_before_wait)) {
    early.resize(static_cast<std::size_t>(data.size_bytes()));
    lane.read(data.data(), early.data(), data.size_bytes());
  }
  work.wait_host();
  if (!early.empty()) lane.write(early.data(), data.data(), data.size_bytes());
}

void GptStage::take_over(const Operation& op) {
  Operation before = op;
  const int stage = stages_.stage_of(groups_.here().pipeline, op.chunk);
  before.chunk = stages_.chunk_of_stage(stage - 1);
  before.stage = stage;
  Operation mine = op;
  mine.stage = stage;
  copy(context_.kernels->memory(), chunk_output(before), message(mine));
}

TensorView GptStage::message(const Operation& op) const {
  const bool forward = op.phase == Phase::forward;
  Carver carver(memory(forward ? MemoryCategory::activations : MemoryCategory::workspace, Part::message, op.phase, -1,
                       op.micro_batch, op.chunk, op.stage)
                    .data(),
                dtype_);
  return carve_stream(carver, local_, at(op.micro_batch).shape);
}

}  // namespace tandem

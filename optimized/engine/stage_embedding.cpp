// SPDX-License-Identifier: Apache-2.0
// h = dropout(wte[ids] + wpe[positions]); tensor ranks hold rows of wte and add up what each has found.
#include <numeric>

#include "optimized/engine/gpt_stage.h"

namespace tandem {
namespace {

// Row of the local part of wte of each token, -1 where another rank holds it.
std::vector<std::int32_t> local_ids(const std::vector<std::int32_t>& ids, Interval part) {
  std::vector<std::int32_t> local;
  local.reserve(ids.size());
  for (const std::int32_t id : ids) {
    local.push_back(id >= part.begin && id < part.end ? static_cast<std::int32_t>(id - part.begin) : -1);
  }
  return local;
}

std::span<const std::int32_t> part_of(std::span<const std::int32_t> all, Interval part) {
  return all.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
}

}  // namespace

void GptStage::embedding_lookup_forward(const Operation& op) {
  const std::vector<std::int32_t> ids = local_ids(at(op.micro_batch).batch.ids, local_.vocabulary_part());
  const TensorView out = local_.sequence_parallel ? workspace(op).partial : embedding_out(op);
  context_.kernels->gather_rows(ids, parameter(*wte_), out);
}

void GptStage::embedding_forward(const Operation& op) {
  const MicroBatch& micro_batch = at(op.micro_batch);
  const TensorView out = embedding_out(op);
  std::vector<std::int32_t> positions = micro_batch.batch.positions;
  // A context rank's tokens keep their positions in the whole row.
  if (context_.pitfalls.on(Pitfall::context_positions_local) && local_.context_ranks > 1) {
    for (std::size_t t = 0; t < positions.size(); ++t) {
      positions[t] = static_cast<std::int32_t>(static_cast<std::int64_t>(t) % micro_batch.shape.sequence);
    }
  }
  context_.kernels->add_gathered_rows(part_of(positions, token_slice(local_, micro_batch.shape)), parameter(*wpe_), out);
  const DropoutSpec spec = residual_dropout(op, DropoutSite::embedding, model_.embedding_dropout);
  if (spec.probability > 0) context_.kernels->dropout_residual_forward(spec, out, {}, out);
  trace_hidden(op, "embedding", out, Tokens::slice);
}

void GptStage::embedding_backward(const Operation& op) {
  const MicroBatch& micro_batch = at(op.micro_batch);
  const TensorView dout = stream(op);
  trace_hidden(op, "embedding", dout, Tokens::slice);
  const DropoutSpec spec = residual_dropout(op, DropoutSite::embedding, model_.embedding_dropout);
  if (spec.probability > 0) context_.kernels->dropout_backward(spec, dout, dout);
  const Interval slice = token_slice(local_, micro_batch.shape);
  context_.kernels->scatter_add_rows(part_of(micro_batch.batch.positions, slice), dout, gradient(*wpe_));
  if (!local_.sequence_parallel) {
    const std::vector<std::int32_t> ids = local_ids(micro_batch.batch.ids, local_.vocabulary_part());
    context_.kernels->scatter_add_rows(ids, dout, gradient(*wte_));
    return;
  }
  Carver carver(
      memory(MemoryCategory::workspace, Part::embedding_lookup, Phase::backward_input, -1, op.micro_batch, op.chunk).data(),
      dtype_);
  const TensorView all = carve_head_gradient(carver, local_, micro_batch.shape);
  context_.kernels->fill(slice_of(op, all), 0.0);
  context_.kernels->add(dout, slice_of(op, all));
}

// Of all tokens, gathered from the slices.
void GptStage::embedding_lookup_backward(const Operation& op) {
  const MicroBatch& micro_batch = at(op.micro_batch);
  Carver carver(
      memory(MemoryCategory::workspace, Part::embedding_lookup, Phase::backward_input, -1, op.micro_batch, op.chunk).data(),
      dtype_);
  const std::vector<std::int32_t> ids = local_ids(micro_batch.batch.ids, local_.vocabulary_part());
  context_.kernels->scatter_add_rows(ids, carve_head_gradient(carver, local_, micro_batch.shape), gradient(*wte_));
}

}  // namespace tandem

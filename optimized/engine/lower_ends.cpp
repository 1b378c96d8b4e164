// SPDX-License-Identifier: Apache-2.0
// Where a chunk's activations come from and where their gradients go: the embedding, or the stage before.
#include "optimized/engine/lowering.h"

namespace tandem {

// The stage before is this rank's: its output is copied, since either may be freed first.
void Lowering::take_over(const Pass& pass) {
  memory(OpKind::allocate, pass, MemoryCategory::activations, Part::message, -1, bytes_of(carve_stream, pass), pass.stage);
  compute(pass, Part::message, -1, 0);
}

void Lowering::forward_embedding(const Pass& pass) {
  memory(OpKind::allocate, pass, MemoryCategory::activations, Part::embedding, -1, bytes_of(carve_stream, pass));
  gather(pass, units_.token_table);
  gather(pass, units_.positions);
  compute(pass, Part::embedding_lookup, -1, 0);
  sum_over_tensor_ranks(pass, Part::embedding_lookup, -1);
  compute(pass, Part::embedding, -1, 0);
  release(pass, units_.token_table);
  release(pass, units_.positions);
}

void Lowering::backward_embedding(const Pass& pass) {
  // Under sequence parallelism the lookup needs the gradient of all tokens.
  Pass weight = pass;
  weight.phase = Phase::backward_weight;
  if (local_.sequence_parallel) {
    memory(OpKind::allocate, pass, MemoryCategory::workspace, Part::embedding_lookup, -1, bytes_of(carve_head_gradient, pass));
  }
  // A tied head on this rank has left its part in the same gradient.
  if (!(units_.head == units_.token_table)) open_gradients(weight, units_.token_table, 1);
  open_gradients(weight, units_.positions, 1);
  compute(weight, Part::embedding, -1, 0);
  close_gradients(weight, units_.positions);
  if (local_.sequence_parallel) {
    gather_slices(weight, Part::embedding, -1);
    compute(weight, Part::embedding_lookup, -1, 0);
    memory(OpKind::free, pass, MemoryCategory::workspace, Part::embedding_lookup, -1, bytes_of(carve_head_gradient, pass));
  }
  close_gradients(weight, units_.token_table);
}

// What the chunk still holds when its last layer is done: its input.
void Lowering::free_chunk(const Pass& pass) {
  Pass forward = pass;
  forward.phase = Phase::forward;
  if (is_first(pass)) {
    memory(OpKind::free, forward, MemoryCategory::activations, Part::embedding, -1, bytes_of(carve_stream, pass));
  } else {
    memory(OpKind::free, forward, MemoryCategory::activations, Part::message, -1, bytes_of(carve_stream, pass), pass.stage);
  }
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// Which activations of a block live how long, and what is computed again before its backward pass.
#include "optimized/engine/lowering.h"

namespace tandem {

Lowering::BlockBytes Lowering::block_bytes(const Pass& pass, int layer) const {
  Carver kept(nullptr, plan_.numerics.storage);
  Carver rest(nullptr, plan_.numerics.storage);
  carve_block(kept, rest, local_, pass.shape, storage_of(pass, layer));
  return {kept.size_bytes(), rest.size_bytes()};
}

// Two allocations of a block: what is kept has phase forward, what is computed again has phase recompute.
void Lowering::allocate_block(const Pass& pass, int layer, bool kept, bool rest) {
  Pass owner = pass;
  const BlockBytes bytes = block_bytes(pass, layer);
  owner.phase = Phase::forward;
  if (kept && !storage_of(pass, layer).none())
    memory(OpKind::allocate, owner, MemoryCategory::activations, Part::block, layer, bytes.kept);
  owner.phase = Phase::recompute;
  if (rest && !storage_of(pass, layer).all())
    memory(OpKind::allocate, owner, MemoryCategory::activations, Part::block, layer, bytes.rest);
}

void Lowering::free_rest(const Pass& pass, int layer) {
  Pass owner = pass;
  owner.phase = Phase::recompute;
  if (storage_of(pass, layer).all()) return;
  memory(OpKind::free, owner, MemoryCategory::activations, Part::block, layer, block_bytes(pass, layer).rest);
}

void Lowering::free_kept(const Pass& pass, int layer) {
  Pass owner = pass;
  owner.phase = Phase::forward;
  if (storage_of(pass, layer).none()) return;
  memory(OpKind::free, owner, MemoryCategory::activations, Part::block, layer, block_bytes(pass, layer).kept);
}

// All of a block, when nothing more needs it.
void Lowering::free_layer(const Pass& pass, int layer) {
  Pass owner = pass;
  owner.phase = Phase::forward;
  if (pass.phase != Phase::forward) {
    memory(OpKind::free, owner, MemoryCategory::workspace, Part::block, layer, bytes_of(carve_block_gradients, pass));
  }
  free_rest(pass, layer);
  free_kept(pass, layer);
}

// After the forward pass of `layer`. The output of a layer that does not end its group is needed by the next one.
void Lowering::free_what_is_recomputed(const Pass& pass, int layer) {
  // What stays allocated although it is computed again saves nothing.
  if (pitfalls_.on(Pitfall::recomputed_activations_kept)) return;
  if (layer > layers_of(pass).begin && !storage_of(pass, layer - 1).out) free_rest(pass, layer - 1);
  if (storage_of(pass, layer).out) free_rest(pass, layer);
}

void Lowering::recompute_before(const Pass& pass, int layer) {
  const BlockStorage storage = storage_of(pass, layer);
  if (storage.all()) return;
  const bool kept_anyway = pitfalls_.on(Pitfall::recomputed_activations_kept);
  Pass again = pass;
  again.phase = Phase::recompute;
  if (storage.inside) {  // selective
    if (!kept_anyway) allocate_block(pass, layer, false, true);
    compute(again, Part::norm_1, layer, 0);
    gather_slices(again, Part::norm_1, layer);
    // Blocked attention keeps nothing that is large; what the materialized one keeps is the largest of all.
    if (local_.materialized_attention) compute(again, Part::attention_core, layer, attention_core_flops(pass));
    compute(again, Part::norm_2, layer, 0);
    gather_slices(again, Part::norm_2, layer);
    compute(again, local_.model.experts == 0 ? Part::mlp : Part::experts, layer, 0);
    return;
  }
  if (!storage.out) return;  // computed again with the layer that ends the group
  auto first = layer;
  while (first > layers_of(pass).begin && !storage_of(pass, first - 1).out) --first;
  memory(OpKind::allocate, again, MemoryCategory::workspace, Part::block, -1, workspace_bytes(again));
  for (int next = first; next <= layer; ++next) {
    if (!kept_anyway) allocate_block(pass, next, false, true);
    gather_layer(again, next);
    recompute_block(again, next);
  }
  memory(OpKind::free, again, MemoryCategory::workspace, Part::block, -1, workspace_bytes(again));
}

void Lowering::recompute_block(const Pass& pass, int layer) {
  attention_forward(pass, layer);
  forward_mlp(pass, layer);
  if (!storage_of(pass, layer).out) compute(pass, Part::mlp_merge, layer, 0);
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// ZeRO as operations: when a unit's parameters and gradients come and go. docs/techniques/zero.md
#include "optimized/engine/lowering.h"
#include "optimized/engine/optimizer.h"

namespace tandem {

Lowering::Units Lowering::find_units() const {
  Units units;
  units.all = parameter_units(parameters_);
  for (std::size_t u = 0; u < units.all.size(); ++u) {
    const GradientBucket& unit = units.all[u];
    const auto index = static_cast<int>(u);
    const ParameterSpec& first = parameters_[static_cast<std::size_t>(unit.parameters.begin)].spec;
    units.ranks.push_back(group_size(unit.axis()));
    units.layers.push_back(first.layer);
    if (first.layer >= 0) {
      (unit.experts ? units.of_experts : units.of_block)[first.layer] = index;
    } else if (first.kind == ParameterKind::token_embedding) {
      units.token_table = index;
    } else if (first.kind == ParameterKind::position_embedding) {
      units.positions = index;
    } else {
      (first.kind == ParameterKind::norm_weight ? units.final_norm : units.head) = index;
    }
  }
  if (local_.model.tied && stages_.holds_head(here_.pipeline)) units.head = units.token_table;
  return units;
}

bool Lowering::is_dealt(int unit, int stage) const {
  return unit >= 0 && plan_.zero_stage >= stage && units_.ranks[static_cast<std::size_t>(unit)] > 1;
}

Operation Lowering::unit_operation(OpKind kind, const Pass& pass, int unit, MemoryCategory category) const {
  const auto u = static_cast<std::size_t>(unit);
  Operation op = operation(kind, pass, Part::block, units_.layers[u]);
  op.bucket = unit;
  op.category = category;
  op.axis = units_.all[u].axis();
  const bool gradients = category == MemoryCategory::gradients;
  op.purpose = gradients ? Purpose::gradient : Purpose::parameter;
  op.collective = gradients ? Collective::reduce_scatter : Collective::all_gather;
  const DType dtype = gradients ? plan_.numerics.accumulate : plan_.numerics.storage;
  op.bytes = units_.all[u].elements.size() * static_cast<std::int64_t>(size_bytes(dtype));
  return op;
}

void Lowering::gather(const Pass& pass, int unit) {
  if (!is_dealt(unit, 3) || gathered_.contains(unit)) return;
  const Operation allocation = unit_operation(OpKind::allocate, pass, unit, MemoryCategory::parameters);
  gathered_.emplace(unit, allocation);
  push(allocation);
  Operation op = unit_operation(OpKind::communicate, pass, unit, MemoryCategory::parameters);
  op.background = plan_.overlap.prefetch;
  const OperationId id = push(std::move(op));
  if (plan_.overlap.prefetch) gathering_.emplace(unit, id);
}

void Lowering::release(const Pass& /*pass*/, int unit) {
  const auto found = gathered_.find(unit);
  if (found == gathered_.end()) return;
  Operation release = found->second;
  release.kind = OpKind::free;
  gathered_.erase(found);
  push(std::move(release));
}

void Lowering::gather_layer(const Pass& pass, int layer) {
  gather(pass, units_.block(layer));
  gather(pass, units_.experts(layer));
}

void Lowering::gather_ahead(const Pass& pass, int layer) {
  if (plan_.overlap.prefetch) gather_layer(pass, layer);
}

// Parameters that an operation of a layer, or outside all, reads must have come. One wait for all units of the layer.
std::vector<OperationId> Lowering::take_gathers(int layer) {
  std::vector<OperationId> waits;
  for (auto under_way = gathering_.begin(); under_way != gathering_.end();) {
    if (units_.layers[static_cast<std::size_t>(under_way->first)] != layer) {
      ++under_way;
      continue;
    }
    waits.push_back(under_way->second);
    under_way = gathering_.erase(under_way);
  }
  return waits;
}

void Lowering::release_layer(const Pass& pass, int layer) {
  release(pass, units_.block(layer));
  release(pass, units_.experts(layer));
}

void Lowering::open_gradients(const Pass& pass, int unit, int additions) {
  if (!is_dealt(unit, 2)) return;
  additions_[unit] += additions;
  if (scattering_.contains(unit)) free_scattered();
  if (opened_.contains(unit)) return;
  const Operation allocation = unit_operation(OpKind::allocate, pass, unit, MemoryCategory::gradients);
  opened_.emplace(unit, allocation);
  push(allocation);
}

void Lowering::close_gradients(const Pass& pass, int unit) {
  if (!is_dealt(unit, 2) || --additions_[unit] > 0) return;
  Operation op = unit_operation(OpKind::communicate, pass, unit, MemoryCategory::gradients);
  op.background = plan_.overlap.gradients;
  const OperationId id = push(std::move(op));
  // With overlap a unit's sum has the time of the next layer's backward pass, and the gradients of both exist at once.
  if (plan_.overlap.gradients) free_scattered(units_.layers[static_cast<std::size_t>(unit)]);
  scattering_.emplace(unit, id);
  if (!plan_.overlap.gradients) free_scattered();
}

void Lowering::free_scattered(int but_of_layer) {
  for (auto under_way = scattering_.begin(); under_way != scattering_.end();) {
    const auto [unit, sum] = *under_way;
    if (but_of_layer >= 0 && units_.layers[static_cast<std::size_t>(unit)] == but_of_layer) {
      ++under_way;
      continue;
    }
    Operation release = opened_.at(unit);
    release.kind = OpKind::free;
    if (plan_.overlap.gradients) release.after = {sum};
    opened_.erase(unit);
    push(std::move(release));
    under_way = scattering_.erase(under_way);
  }
}

// Stages 1 and 2: everybody gets what the owners have updated.
void Lowering::update_gathers() {
  if (plan_.zero_stage != 1 && plan_.zero_stage != 2) return;
  for (std::size_t u = 0; u < units_.all.size(); ++u) {
    const auto unit = static_cast<int>(u);
    if (!is_dealt(unit, 1)) continue;
    Operation op = unit_operation(OpKind::communicate, Pass{}, unit, MemoryCategory::parameters);
    op.micro_batch = -1;
    push(std::move(op));
  }
}

// Each rank has the sums of squares of its own parts alone.
void Lowering::norm_partials() {
  if (plan_.zero_stage == 0) return;
  const NormPartialCounts counts =
      norm_partial_counts(parameters_, group_size(GroupAxis::gradient), group_size(GroupAxis::expert_gradient));
  sum_of_scalars(GroupAxis::gradient, counts.dense);
  sum_of_scalars(GroupAxis::expert_gradient, counts.experts);
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// ZeRO: gradients are reduced to the rank that keeps them, parameters are gathered for those that compute with them.
#include <algorithm>

#include "optimized/engine/step_state.h"

namespace tandem {
namespace {

// Planted: this rank lays the bucket out in the order in which its gradients became ready, here the last tensor first.
void rotate_by_last_tensor(ParameterStore& store, int unit_index) {
  const GradientBucket& unit = store.units()[static_cast<std::size_t>(unit_index)];
  const std::int64_t last = store.parameters()[static_cast<std::size_t>(unit.parameters.end - 1)].num_elements();
  HostView host(store.memory(), store.unit_gradients(unit_index), Access::update);
  const TensorView gradients = host.view();
  auto* const begin = static_cast<std::byte*>(gradients.data());
  std::byte* const end = begin + gradients.size_bytes();
  std::rotate(begin, end - last * static_cast<std::int64_t>(size_bytes(gradients.dtype())), end);
}

}  // namespace

// The sum lands in the owned part of the unit's own memory; where gradients are dealt (stages 2 and 3) it is added to what
// earlier micro-batches have left.
Engine::UnderWay Engine::scatter_bucket(const Operation& op) {
  if (context_.pitfalls.on(Pitfall::all_reduce_dropped)) return {};
  const GradientBucket& unit = store_.units()[static_cast<std::size_t>(op.bucket)];
  Communicator& replicas = groups_.of(unit.axis());
  if (context_.pitfalls.on(Pitfall::buckets_in_arrival_order) && replicas.rank() + 1 == replicas.size()) {
    rotate_by_last_tensor(store_, op.bucket);
  }
  const TensorView all = store_.unit_gradients(op.bucket);
  const Interval own = store_.owned(op.bucket);
  const TensorView sum = all.flat(own.begin, own.size());
  const std::vector<std::int64_t> counts = part_sizes(unit, replicas.size());
  const Progress progress = op.background ? Progress::background : Progress::on_wait;
  UnderWay under_way;
  under_way.work = replicas.reduce_scatter(all, sum, counts, {op.purpose, to_string(op), progress});
  if (!store_.keeps_whole_gradients()) {
    under_way.then = [this, sum, bucket = op.bucket] { context_.kernels->add(sum, store_.owned_gradients(bucket)); };
  }
  return under_way;
}

void Engine::gather_parameters(OperationId id, const Operation& op) {
  const GradientBucket& unit = store_.units()[static_cast<std::size_t>(op.bucket)];
  Communicator& replicas = groups_.of(unit.axis());
  const std::vector<std::int64_t> counts = part_sizes(unit, replicas.size());
  const bool just_in_time = options_.plan.zero_stage == 3;
  if (just_in_time && context_.pitfalls.on(Pitfall::gathered_weights_stale) && store_.was_gathered(op.bucket)) return;
  const CommOptions options{op.purpose, to_string(op), op.background ? Progress::background : Progress::on_wait};
  UnderWay under_way;
  under_way.work = replicas.all_gather(store_.owned_parameters(op.bucket), store_.unit_parameters(op.bucket), counts, options);
  if (just_in_time) store_.stamp(op.bucket);
  start(id, op, std::move(under_way));
}

}  // namespace tandem

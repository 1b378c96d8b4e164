// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/whole_tensors.h"

#include "core/shard_runs.h"

namespace tandem {
namespace {

// Both are whole elements of `element` bytes.
void place(const ShardSpec& shard, const void* local, const ShardSpec& all, std::vector<std::byte>& memory, std::size_t element) {
  const auto bytes = static_cast<std::size_t>(shard.num_elements()) * element;
  copy_common(shard_runs(shard), {static_cast<const std::byte*>(local), bytes}, shard_runs(all), memory, element);
}

const OwnedPart* find(const std::vector<OwnedPart>& kept, const std::string& name) {
  for (const OwnedPart& part : kept) {
    if (part.shard.global_name == name) return &part;
  }
  return nullptr;
}

}  // namespace

std::vector<WholeTensor> gather_whole_tensors(Communicator& world, const GptConfig& model, const TrainingPlan& plan,
                                              const ParameterStore& store, PartView view) {
  const CommOptions options{Purpose::parameter, "whole tensors", Progress::on_wait};
  const DType dtype = plan.numerics.master;
  const std::size_t element = size_bytes(dtype);
  const ProcessGrid grid(plan);
  std::vector<std::vector<OwnedPart>> kept;
  for (int rank = 0; rank < world.size(); ++rank) {
    kept.push_back(ownership(local_parameters(model, plan, grid, rank), plan, grid, rank).parts);
  }
  std::vector<WholeTensor> tensors;
  for (const ParameterSpec& spec : gpt_parameters(model)) {
    WholeTensor whole{spec.name, {}, {}};
    const ShardSpec all = tandem::whole(spec.name, spec.shape, dtype);
    for (int rank = 0; rank < world.size(); ++rank) {
      const OwnedPart* part = find(kept[static_cast<std::size_t>(rank)], spec.name);
      if (part == nullptr || part->shard.replica_index != 0) continue;
      if (rank == world.rank() && rank != 0) world.send((store.*view)(*part), 0, {}, options).wait_host();
      if (world.rank() != 0) continue;
      if (rank == 0 && part->shard.is_whole() && store.memory().on_host()) {
        const TensorView values = (store.*view)(*part);
        whole.values = TensorView(values.data(), dtype, spec.shape);
        continue;
      }
      whole.memory.resize(static_cast<std::size_t>(spec.num_elements()) * element);
      whole.values = TensorView(whole.memory.data(), dtype, spec.shape);
      if (rank == 0) {
        const HostView own(store.memory(), (store.*view)(*part), Access::read);
        place(part->shard, own.view().data(), all, whole.memory, element);
        continue;
      }
      std::vector<std::byte> local(static_cast<std::size_t>(part->elements.size()) * element);
      world.recv(TensorView(local.data(), dtype, {part->elements.size()}), rank, {}, options).wait_host();
      place(part->shard, local.data(), all, whole.memory, element);
    }
    if (world.rank() == 0) tensors.push_back(std::move(whole));
  }
  return tensors;
}

}  // namespace tandem

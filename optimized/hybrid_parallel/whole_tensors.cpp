// SPDX-License-Identifier: Apache-2.0
#include "optimized/hybrid_parallel/whole_tensors.h"

#include <cstring>

namespace tandem {
namespace {

void place(const ShardSpec& shard, const std::byte* local, std::size_t element, std::byte* whole) {
  const std::vector<std::int64_t> indices = global_indices(shard);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] >= 0) std::memcpy(whole + static_cast<std::size_t>(indices[i]) * element, local + i * element, element);
  }
}

const LocalParameter* find(const std::vector<LocalParameter>& held, const std::string& name) {
  for (const LocalParameter& parameter : held) {
    if (parameter.spec.name == name) return &parameter;
  }
  return nullptr;
}

}  // namespace

std::vector<WholeTensor> gather_whole_tensors(Communicator& world, const GptConfig& model, const TrainingPlan& plan,
                                              const ParameterStore& store,
                                              TensorView (ParameterStore::*view)(std::size_t) const) {
  const CommOptions options{Purpose::parameter, "whole tensors", Progress::on_wait};
  const DType dtype = (store.*view)(0).dtype();
  const std::size_t element = size_bytes(dtype);
  const ProcessGrid grid(plan);
  std::vector<std::vector<LocalParameter>> held;
  for (int rank = 0; rank < world.size(); ++rank) held.push_back(local_parameters(model, plan, grid, rank));
  std::vector<WholeTensor> tensors;
  for (const ParameterSpec& spec : gpt_parameters(model)) {
    WholeTensor whole{spec.name, {}, {}};
    for (int rank = 0; rank < world.size(); ++rank) {
      const LocalParameter* part = find(held[static_cast<std::size_t>(rank)], spec.name);
      if (part == nullptr || part->shard.replica_index != 0) continue;
      if (rank == world.rank() && rank != 0) {
        world.send((store.*view)(store.index_of(spec.name)), 0, {}, options).wait_host();
      }
      if (world.rank() != 0) continue;
      if (rank == 0 && part->shard.is_whole()) {
        whole.values = (store.*view)(store.index_of(spec.name));
        continue;
      }
      whole.memory.resize(static_cast<std::size_t>(spec.num_elements()) * element);
      whole.values = TensorView(whole.memory.data(), dtype, spec.shape);
      if (rank == 0) {
        place(part->shard, static_cast<const std::byte*>((store.*view)(store.index_of(spec.name)).data()), element,
              whole.memory.data());
        continue;
      }
      std::vector<std::byte> local(static_cast<std::size_t>(part->num_elements()) * element);
      world.recv(TensorView(local.data(), dtype, {part->num_elements()}), rank, {}, options).wait_host();
      place(part->shard, local.data(), element, whole.memory.data());
    }
    if (world.rank() == 0) tensors.push_back(std::move(whole));
  }
  return tensors;
}

}  // namespace tandem

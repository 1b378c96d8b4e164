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
    for (int rank = 0; rank < world.size(); ++rank) {
      const OwnedPart* part = find(kept[static_cast<std::size_t>(rank)], spec.name);
      if (part == nullptr || part->shard.replica_index != 0) continue;
      if (rank == world.rank() && rank != 0) world.send((store.*view)(*part), 0, {}, options).wait_host();
      if (world.rank() != 0) continue;
      if (rank == 0 && part->shard.is_whole()) {
        const TensorView values = (store.*view)(*part);
        whole.values = TensorView(values.data(), dtype, spec.shape);
        continue;
      }
      whole.memory.resize(static_cast<std::size_t>(spec.num_elements()) * element);
      whole.values = TensorView(whole.memory.data(), dtype, spec.shape);
      if (rank == 0) {
        place(part->shard, static_cast<const std::byte*>((store.*view)(*part).data()), element, whole.memory.data());
        continue;
      }
      std::vector<std::byte> local(static_cast<std::size_t>(part->elements.size()) * element);
      world.recv(TensorView(local.data(), dtype, {part->elements.size()}), rank, {}, options).wait_host();
      place(part->shard, local.data(), element, whole.memory.data());
    }
    if (world.rank() == 0) tensors.push_back(std::move(whole));
  }
  return tensors;
}

}  // namespace tandem

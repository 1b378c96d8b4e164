// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/snapshot.h"

#include <map>

#include "optimized/zero/ownership.h"

namespace tandem {
namespace {

constexpr std::pair<const char*, PartView> kMoments[] = {{"m.", &ParameterStore::first_moment},
                                                         {"v.", &ParameterStore::second_moment}};

// Ranks that store parts of the same tensors, each its share of them.
struct Sharing {
  int writers = 1;
  int index = 0;
  bool expert = false;  // experts' parameters have other replicas than dense ones
  friend auto operator<=>(const Sharing&, const Sharing&) = default;
};

// Empty-handed (index -1): the second copy of the embedding, on the other end of the pipeline, whose parts may be cut elsewhere.
Sharing sharing_of(const OwnedPart& part, const LocalParameter& parameter, const PitfallSet& pitfalls) {
  const int copies = parameter.tied_copy ? 2 : 1;
  Sharing sharing{part.shard.replica_count / copies, part.shard.replica_index, parameter.expert()};
  if (sharing.index >= sharing.writers) sharing.index = -1;
  if (pitfalls.on(Pitfall::every_replica_writes)) return {1, 0, sharing.expert};
  return sharing;
}

std::int64_t overlap(Interval one, Interval other) {
  return std::max<std::int64_t>(0, std::min(one.end, other.end) - std::max(one.begin, other.begin));
}

// The elements `chosen` of what `part` keeps.
ShardSpec piece_of(const OwnedPart& part, Interval chosen, DType dtype) {
  ShardSpec shard = part.shard;
  shard.dtype = dtype;
  const bool all = chosen == Interval{0, part.elements.size()};
  if (!all || shard.flat_range) shard.flat_range = {part.elements.begin + chosen.begin, part.elements.begin + chosen.end};
  shard.replica_index = 0;
  shard.replica_count = 1;
  return shard;
}

}  // namespace

std::vector<CheckpointPart> checkpoint_parts(const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, int rank,
                                             const PitfallSet& pitfalls) {
  const ProcessGrid grid(plan);
  const std::vector<LocalParameter> parameters = local_parameters(model, plan, grid, rank);
  const std::vector<OwnedPart> owned = ownership(parameters, plan, grid, rank).parts;
  std::map<Sharing, std::int64_t> total;
  for (const OwnedPart& part : owned) total[sharing_of(part, parameters[part.parameter], pitfalls)] += part.elements.size();
  std::map<Sharing, std::int64_t> before;
  std::vector<CheckpointPart> parts;
  for (std::size_t i = 0; i < owned.size(); ++i) {
    const Sharing sharing = sharing_of(owned[i], parameters[owned[i].parameter], pitfalls);
    if (sharing.index < 0) continue;
    const std::int64_t first = before[sharing];
    const std::int64_t size = owned[i].elements.size();
    before[sharing] += size;
    const Interval share = balanced_part(total[sharing], sharing.writers, sharing.index);
    if (overlap(share, {first, first + size}) == 0) continue;
    const Interval chosen{std::max(share.begin - first, std::int64_t{0}), std::min(share.end - first, size)};
    const ShardSpec shard = piece_of(owned[i], chosen, plan.numerics.master);
    parts.push_back({shard.global_name, shard, i, chosen, &ParameterStore::master});
  }
  if (optimizer != OptimizerKind::adamw) return parts;
  const std::size_t parameters_only = parts.size();
  for (const auto& [prefix, view] : kMoments) {
    for (std::size_t i = 0; i < parameters_only; ++i) {
      CheckpointPart moment = parts[i];
      moment.name = prefix + moment.name;
      moment.view = view;
      parts.push_back(std::move(moment));
    }
  }
  return parts;
}

void Snapshot::reserve(const Engine& engine) {
  if (memory_) return;
  const EngineOptions& options = engine.options();
  parts_ =
      checkpoint_parts(options.model, options.plan, options.optimizer.kind, engine.groups().rank(), engine.context().pitfalls);
  offsets_.clear();
  size_bytes_ = 0;
  for (const CheckpointPart& part : parts_) {
    offsets_.push_back(size_bytes_);
    size_bytes_ += part.elements.size() * static_cast<std::int64_t>(tandem::size_bytes(part.shard.dtype));
  }
  memory_ = arena_.allocate(size_bytes_, MemoryCategory::workspace);
}

void Snapshot::take(Engine& engine) {
  reserve(engine);
  // Nothing of a device's memory can be aliased.
  const bool aliases = engine.context().pitfalls.on(Pitfall::snapshot_aliases_live_state) && engine.store().memory().on_host();
  live_.clear();
  const ParameterStore& store = engine.store();
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const CheckpointPart& part = parts_[i];
    const TensorView source = (store.*part.view)(store.parts()[part.part]).flat(part.elements.begin, part.elements.size());
    if (aliases) {
      live_.push_back(source);
      continue;
    }
    read_tensor(store.memory(), source, static_cast<std::byte*>(memory_.data()) + offsets_[i]);
  }
  residuals_ = residual_snapshot(engine);
}

std::span<const std::byte> Snapshot::bytes(std::size_t part) const {
  const auto size = static_cast<std::size_t>(parts_[part].elements.size()) * tandem::size_bytes(parts_[part].shard.dtype);
  if (!live_.empty()) return {static_cast<const std::byte*>(live_[part].data()), size};
  return {static_cast<const std::byte*>(memory_.data()) + offsets_[part], size};
}

}  // namespace tandem

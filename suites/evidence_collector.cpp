// SPDX-License-Identifier: Apache-2.0
#include "suites/evidence_collector.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "core/io/hash.h"
#include "suites/evidence_stage.h"

namespace tandem {
namespace {

std::uint64_t hash_of(const ParameterStore& store, TensorView values) {
  const HostView host(store.memory(), values, Access::read);
  const TensorView view = host.view();
  return hash64({static_cast<const std::byte*>(view.data()), static_cast<std::size_t>(view.size_bytes())});
}

void unscale(std::vector<double>& values, const Engine& engine) {
  for (double& value : values) value /= engine.loss_scaler().scale();
}

// What this rank computes with, where that is another copy than what it updates: all ranks must have the same.
void add_stored(EvidenceCollector::Stage& mine, const std::string& stage, const Engine& engine) {
  const ParameterStore& store = engine.store();
  const int zero = engine.options().plan.zero_stage;
  if (zero == 3 || (zero == 0 && !store.has_master_copy())) return;
  for (std::size_t i = 0; i < store.size(); ++i) {
    const ShardSpec& shard = store.shard(i);
    mine.hashes.push_back({shard.global_name, shard.describe_slices() + " as stored", stage, engine.groups().rank(),
                           hash_of(store, store.parameter(i))});
  }
}

}  // namespace

void EvidenceCollector::collect(const std::string& stage, int step, const Engine& engine, PartView view) {
  const std::scoped_lock lock(mutex_);
  Stage& mine = stages_[stage];
  mine.step = step;
  const ParameterStore& store = engine.store();
  for (const OwnedPart& part : store.parts()) {
    const ShardSpec& shard = part.shard;
    const TensorView local = (store.*view)(part);
    mine.hashes.push_back({shard.global_name, shard.describe_slices(), stage, engine.groups().rank(), hash_of(store, local)});
    if (shard.replica_index != 0) continue;
    std::vector<double>& whole = mine.tensors[shard.global_name];
    // What no rank holds stays NaN, which no bound lets pass.
    if (whole.empty()) whole.assign(static_cast<std::size_t>(num_elements(shard.global_shape)), std::nan(""));
    std::vector<double> values = ParameterStore::values_of(store.memory(), local);
    if (view == PartView(&ParameterStore::gradient)) unscale(values, engine);
    scatter_into(shard, values, whole);
  }
  if (view == &ParameterStore::master) add_stored(mine, stage, engine);
}

void EvidenceCollector::merge(const Stages& others) {
  const std::scoped_lock lock(mutex_);
  for (const auto& [name, theirs] : others) {
    Stage& mine = stages_[name];
    mine.step = theirs.step;
    mine.hashes.insert(mine.hashes.end(), theirs.hashes.begin(), theirs.hashes.end());
    for (const auto& [tensor, values] : theirs.tensors) {
      std::vector<double>& whole = mine.tensors[tensor];
      if (whole.empty()) {
        whole = values;
        continue;
      }
      TANDEM_CHECK(whole.size() == values.size(), tensor);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        if (!std::isnan(values[i])) whole[i] = values[i];
      }
    }
  }
}

void EvidenceCollector::finish(std::initializer_list<std::string_view> order) {
  for (const std::string_view name : order) {
    Stage& stage = stages_[std::string(name)];
    std::vector<StageTensor> tensors;
    for (const ParameterSpec& spec : gpt_parameters(inputs_.model)) {
      tensors.push_back({spec.name, std::move(stage.tensors[spec.name])});
    }
    evidence_.stages.push_back(make_stage(inputs_, name, stage.step, std::move(tensors)));
    // In the order of the model, whichever rank came first.
    std::stable_sort(stage.hashes.begin(), stage.hashes.end(),
                     [&](const ReplicaHash& a, const ReplicaHash& b) { return place(a.tensor) < place(b.tensor); });
    evidence_.replicas.insert(evidence_.replicas.end(), stage.hashes.begin(), stage.hashes.end());
  }
}

std::size_t EvidenceCollector::place(const std::string& name) {
  if (places_.empty()) {
    for (const ParameterSpec& spec : gpt_parameters(inputs_.model)) places_.emplace(spec.name, places_.size());
  }
  return places_.at(name);
}

}  // namespace tandem

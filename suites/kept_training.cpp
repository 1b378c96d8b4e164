// SPDX-License-Identifier: Apache-2.0
#include "suites/kept_training.h"

#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tandem {
namespace {

template <class T>
void add_value(Hasher128& hasher, const T& value) {
  hasher.update(std::as_bytes(std::span(&value, 1)));
}

template <class T>
void add_values(Hasher128& hasher, const std::vector<T>& values) {
  add_value(hasher, values.size());
  hasher.update(std::as_bytes(std::span(values)));
}

// Here and in key_of() every member is named, so that one that is added to the structure later cannot be forgotten.
void add_batch(Hasher128& hasher, const Batch& batch) {
  const auto& [rows, sequence, ids, targets, positions, document_starts, row_ids] = batch;
  add_value(hasher, rows);
  add_value(hasher, sequence);
  add_values(hasher, ids);
  add_values(hasher, targets);
  add_values(hasher, positions);
  add_values(hasher, document_starts);
  add_values(hasher, row_ids);
}

template <class Real>
Hash128 hash_of(const reference::NamedTensors<Real>& tensors) {
  Hasher128 hasher;
  for (const auto& [name, values] : tensors) {
    add_values(hasher, std::vector<char>(name.begin(), name.end()));
    add_values(hasher, values);
  }
  return hasher.digest();
}

template <class Real>
TrainingKey key_of(const reference::TrainingRun& run, const std::optional<reference::NamedTensors<Real>>& initial) {
  const auto& [model, optimizer, schedule, layout, steps, seed, initialization, batch, numerics, loss_scale, fp8, materialized] =
      run;
  Hasher128 batches;
  for (std::int64_t step = 0; step < steps; ++step) add_batch(batches, batch(step));
  TrainingKey key;
  key.batches = batches.digest();
  if (initial) key.initial = hash_of(*initial);
  key.seed = seed;
  key.steps = steps;
  key.initialization = initialization;
  key.model = model;
  key.optimizer = optimizer;
  key.schedule = schedule;
  key.layout = layout;
  key.numerics = numerics;
  key.loss_scale = loss_scale;
  key.fp8 = fp8;
  key.materialized_attention = materialized;
  return key;
}

template <class Real>
std::int64_t bytes_of(const reference::TrainingRecord<Real>& record) {
  std::int64_t bytes = sizeof(record);
  const auto add = [&bytes](const reference::NamedTensors<Real>& tensors) {
    for (const auto& [name, values] : tensors) bytes += static_cast<std::int64_t>(values.size() * sizeof(Real));
  };
  for (const auto* tensors : {&record.gradients_step0, &record.parameters_step1, &record.parameters}) add(*tensors);
  add(record.optimizer.m);
  add(record.optimizer.v);
  return bytes;
}

}  // namespace

template <class Real>
auto KeptTraining<Real>::train(const reference::TrainingRun& run, const std::optional<reference::NamedTensors<Real>>& initial)
    -> std::shared_ptr<const Record> {
  TrainingKey key = key_of(run, initial);
  if (auto record = find(key)) return record;
  auto record = std::make_shared<const Record>(reference::train<Real>(run, initial));
  keep({std::move(key), record, bytes_of(*record)});
  return record;
}

template <class Real>
auto KeptTraining<Real>::find(const TrainingKey& key) -> std::shared_ptr<const Record> {
  const std::lock_guard lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (!(entry->key == key)) continue;
    entries_.splice(entries_.begin(), entries_, entry);
    return entry->record;
  }
  return nullptr;
}

template <class Real>
void KeptTraining<Real>::keep(Entry entry) {
  const std::lock_guard lock(mutex_);
  ++trained_;
  bytes_ += entry.bytes;
  entries_.push_front(std::move(entry));
  while (bytes_ > most_bytes_) {
    bytes_ -= entries_.back().bytes;
    entries_.pop_back();
  }
}

template <class Real>
std::int64_t KeptTraining<Real>::times_trained() const {
  const std::lock_guard lock(mutex_);
  return trained_;
}

template <class Real>
std::int64_t KeptTraining<Real>::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

template <class Real>
std::shared_ptr<const reference::TrainingRecord<Real>> kept_training(
    const reference::TrainingRun& run, const std::optional<reference::NamedTensors<Real>>& initial) {
  constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;
  static KeptTraining<Real> kept(kMostBytes);
  return kept.train(run, initial);
}

template class KeptTraining<float>;
template class KeptTraining<double>;
template std::shared_ptr<const reference::TrainingRecord<float>> kept_training(
    const reference::TrainingRun&, const std::optional<reference::NamedTensors<float>>&);
template std::shared_ptr<const reference::TrainingRecord<double>> kept_training(
    const reference::TrainingRun&, const std::optional<reference::NamedTensors<double>>&);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "core/io/hash.h"
#include "reference/training.h"

namespace tandem {

/// What determines the record of reference::train(), all of it: records are equal where these are. Tokens and initial
/// parameters stand here by the hash of their bytes.
struct TrainingKey {
  Hash128 batches;                 ///< of every step, in their order, each with its shape
  std::optional<Hash128> initial;  ///< nothing: those of the seed
  std::uint64_t seed = 0;
  std::int64_t steps = 0;
  Initialization initialization = Initialization::gpt2;
  GptConfig model;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  reference::DataParallelLayout layout;
  Numerics numerics;
  LossScaleConfig loss_scale;
  Fp8Config fp8;
  bool materialized_attention = false;
  friend bool operator==(const TrainingKey&, const TrainingKey&) = default;
};

/// Records of the reference, kept for runs that are equal in everything that determines one. The layouts of a suite share the
/// truth, and every fault that is planted into a case shares both sides of it, so that the slow loops of the reference run once.
/// Nothing of a candidate is part of a key, and none of a candidate's work is kept. Any thread may ask.
template <class Real>
class KeptTraining {
 public:
  using Record = reference::TrainingRecord<Real>;

  /// Those that were not asked for the longest go where more than `most_bytes` of tensors are kept.
  explicit KeptTraining(std::int64_t most_bytes) : most_bytes_(most_bytes) {}

  /// reference::train(run, initial)
  [[nodiscard]] std::shared_ptr<const Record> train(const reference::TrainingRun& run,
                                                    const std::optional<reference::NamedTensors<Real>>& initial = {});

  [[nodiscard]] std::int64_t times_trained() const;  ///< as often nothing was kept
  [[nodiscard]] std::int64_t kept_bytes() const;

 private:
  struct Entry {
    TrainingKey key;
    std::shared_ptr<const Record> record;
    std::int64_t bytes = 0;
  };
  [[nodiscard]] std::shared_ptr<const Record> find(const TrainingKey& key);
  void keep(Entry entry);

  const std::int64_t most_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  ///< the one that was asked for last is first
  std::int64_t bytes_ = 0, trained_ = 0;
};

/// Of this process, with at most 64 MiB of each precision.
template <class Real>
[[nodiscard]] std::shared_ptr<const reference::TrainingRecord<Real>> kept_training(
    const reference::TrainingRun& run, const std::optional<reference::NamedTensors<Real>>& initial = {});

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/pitfall.h"
#include "core/shard.h"
#include "optimized/checkpoint/residuals.h"
#include "optimized/engine/engine.h"
#include "optimized/memory/arena.h"

namespace tandem {

/// What a rank stores of one tensor.
struct CheckpointPart {
  std::string name;      ///< of the tensor: "m.wte.weight"
  ShardSpec shard;       ///< dtype: that of the master copies
  std::size_t part = 0;  ///< index in ParameterStore::parts()
  Interval elements;     ///< of that part
  PartView view;
};

/// Who stores what: the parameters' master copies and, with AdamW, both moments, each element once. Parts that n ranks keep are
/// put one behind the other and cut into n equal ranges, so that all write equally much and few tensors are cut. The second copy
/// of a tied embedding writes nothing. A function of its arguments: rank 0 makes the index of all ranks from it.
[[nodiscard]] std::vector<CheckpointPart> checkpoint_parts(const GptConfig& model, const TrainingPlan& plan,
                                                           OptimizerKind optimizer, int rank, const PitfallSet& pitfalls = {});

/// A copy of what this rank stores, in host memory of its own that is kept from one time to the next.
class Snapshot {
 public:
  /// Takes and touches the memory that take() will need, which else the first of them does: fresh memory is slow, and what does
  /// not fit is better known before the first step.
  void reserve(const Engine& engine);
  /// Copies. Collective where gradients are compressed.
  void take(Engine& engine);

  [[nodiscard]] const std::vector<CheckpointPart>& parts() const noexcept { return parts_; }
  [[nodiscard]] std::span<const std::byte> bytes(std::size_t part) const;
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return size_bytes_; }
  /// What compression has left over on this rank; no tensors: nothing.
  [[nodiscard]] const ResidualSnapshot& residuals() const noexcept { return residuals_; }

 private:
  Arena arena_;
  Arena::Buffer memory_;
  std::vector<CheckpointPart> parts_;
  std::vector<std::int64_t> offsets_;  ///< bytes
  std::int64_t size_bytes_ = 0;
  ResidualSnapshot residuals_;
  std::vector<TensorView> live_;  ///< only where the pitfall aliases
};

}  // namespace tandem

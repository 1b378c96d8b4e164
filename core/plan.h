// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/model_config.h"

namespace tandem {

/// How many ranks share the work along each axis; their product is the number of ranks.
struct ParallelDegrees {
  int data = 1;
  int tensor = 1;
  int pipeline = 1;
  int context = 1;
  int expert = 1;

  [[nodiscard]] int world_size() const noexcept { return data * tensor * pipeline * context; }
  friend bool operator==(const ParallelDegrees&, const ParallelDegrees&) = default;
};

/// Rows of a step over all ranks, dealt to data ranks and then to micro-batches by micro_batch_rows (core/batch.h).
struct GlobalBatch {
  std::int64_t rows = 8;
  int micro_batches = 1;  ///< accumulation: micro-batches per data rank and step

  friend bool operator==(const GlobalBatch&, const GlobalBatch&) = default;
};

/// Gradients are reduced in buckets of about this size, in backward order. 0: one bucket.
struct BucketConfig {
  std::int64_t bucket_bytes = 0;

  friend bool operator==(const BucketConfig&, const BucketConfig&) = default;
};

/// How a training step is distributed and computed: everything but the model, the data and the optimizer. Plain data, one engine
/// executes it.
struct TrainingPlan {
  ParallelDegrees parallel;
  Numerics numerics;
  std::string precision = "fp32";  ///< the name that `numerics` came from
  GlobalBatch batch;
  BucketConfig buckets;
  std::string schedule = "none";  ///< pipeline schedule
  std::string recompute = "none";
  int zero_stage = 0;
  int threads_per_rank = 1;

  friend bool operator==(const TrainingPlan&, const TrainingPlan&) = default;
};

/// Why a plan cannot run: the option at fault and what to do.
struct Conflict {
  std::string option;
  std::string reason;
};

/// Empty when the plan is legal for the model. Options that this version does not implement are conflicts that say so.
[[nodiscard]] std::vector<Conflict> conflicts(const TrainingPlan& plan, const GptConfig& model);

/// Throws InputError with every conflict in one line.
void require_legal(const TrainingPlan& plan, const GptConfig& model);

}  // namespace tandem

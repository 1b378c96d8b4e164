// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/model_config.h"

namespace tandem {

/// How many ranks share the work along each axis. The number of ranks is data * tensor * pipeline * context: expert-parallel
/// groups lie inside the data axis (`expert` neighbouring data ranks hold different experts), so expert must divide data.
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

/// Which communication goes on while the rank computes (docs/techniques/overlap.md). Changes no bit of the result.
struct OverlapConfig {
  bool gradients = false;  ///< each bucket is reduced as soon as it is complete, while the backward pass goes on
  bool prefetch = true;    ///< zero 3: the next unit's parameters are gathered while this one computes
  /// With sequence_parallel: products whose sum is scattered over the tensor ranks are made in so many pieces, each scattered
  /// while the next is computed. 1: whole. The bits are those of whole products where a row of a product does not depend on how
  /// many rows are computed with it (oneDNN with AVX-512: 16 or more), else as near as those of any other number of ranks.
  int tensor_chunks = 1;

  friend bool operator==(const OverlapConfig&, const OverlapConfig&) = default;
};

/// Lossy compression of gradient buckets between ranks (docs/techniques/compression.md).
struct CompressionConfig {
  std::string codec = "none";  ///< none, int8, int4, top_k, random_k, sign, power_sgd
  bool error_feedback = true;  ///< what was not sent is added to the next step's gradient
  std::int64_t block = 256;    ///< int8, int4, sign: elements that share a scale
  double density = 0.01;       ///< top_k, random_k: share of the elements that is sent, at least one
  int rank = 4;                ///< power_sgd: of the approximation

  friend bool operator==(const CompressionConfig&, const CompressionConfig&) = default;
};

/// How layers are dealt to pipeline ranks and in which order their work is done (docs/techniques/pipeline_parallel.md).
struct PipelineConfig {
  /// gpipe, 1f1b, interleaved, zb-h1, zb-v. 1f1b with several chunks is interleaved.
  std::string schedule = "1f1b";
  int chunks = 1;  ///< model chunks of each rank: interleaved any number from 2, zb-v 2, gpipe and zb-h1 1
  /// Layers of each stage in order of the model, e.g. "3-2-2-1"; empty: dealt by balanced_part. Stages: pipeline * chunks.
  std::string stage_layers = {};

  [[nodiscard]] std::string_view effective_schedule() const noexcept {
    return schedule == "1f1b" && chunks > 1 ? std::string_view("interleaved") : std::string_view(schedule);
  }
  friend bool operator==(const PipelineConfig&, const PipelineConfig&) = default;
};

/// Activations that are not kept but computed again in the backward pass (docs/techniques/recomputation.md).
struct RecomputeConfig {
  /// none; selective: outputs of the norms and of GELU; full: everything in a block but what enters it
  std::string mode = "none";
  int layers = 1;  ///< full: what enters is kept for every group of so many layers

  friend bool operator==(const RecomputeConfig&, const RecomputeConfig&) = default;
};

/// How the loss is scaled so that small gradients do not vanish in 16 bits (docs/techniques/loss_scaling.md).
struct LossScaleConfig {
  /// auto: dynamic where anything is fp16, else none; none; dynamic; static: always `initial`
  std::string mode = "auto";
  double initial = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  ///< updates without overflow before the scale grows

  friend bool operator==(const LossScaleConfig&, const LossScaleConfig&) = default;
};

/// Delayed scaling of fp8 operands: the scale of a tensor follows from its largest values in the last steps.
struct Fp8Config {
  int history = 16;  ///< steps
  int margin = 0;    ///< powers of two left free

  friend bool operator==(const Fp8Config&, const Fp8Config&) = default;
};

/// How a training step is distributed and computed: everything but the model, the data and the optimizer. Plain data, one engine
/// executes it.
struct TrainingPlan {
  ParallelDegrees parallel;
  Numerics numerics;
  std::string precision = "fp32";  ///< the name that `numerics` came from
  /// wide: gradients are summed in fp32 (fp64); stored: over micro-batches and on the wire in the storage's dtype
  std::string gradients = "wide";
  GlobalBatch batch;
  BucketConfig buckets;
  OverlapConfig overlap;
  CompressionConfig compression;
  PipelineConfig pipeline;
  bool sequence_parallel = false;  ///< layer norm, dropout and residual on slices of the tokens over the tensor ranks
  /// Order of the axes in the numbering of ranks, fastest first (core/process_grid.h).
  std::string rank_order = "tensor-context-data-pipeline";
  RecomputeConfig recompute;
  /// blocked: no [T, T] matrix outlives an operation; materialized: the probabilities are kept for the backward pass
  std::string attention = "blocked";
  /// 0; 1: optimizer state, 2: and gradients, 3: and parameters dealt to the ranks that would hold the same
  /// (docs/techniques/zero.md)
  int zero_stage = 0;
  std::string offload = "none";  ///< optimizer: master weights and moments live in host memory
  LossScaleConfig loss_scale;
  Fp8Config fp8;
  int threads_per_rank = 1;

  friend bool operator==(const TrainingPlan&, const TrainingPlan&) = default;
};

/// Whether a step multiplies its loss by a scale, and whether that scale changes.
[[nodiscard]] bool scales_loss(const TrainingPlan& plan);
[[nodiscard]] bool scales_loss_dynamically(const TrainingPlan& plan);

/// The same work on a single rank.
[[nodiscard]] TrainingPlan on_one_rank(TrainingPlan plan);

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

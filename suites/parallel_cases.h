// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/synthetic_corpus.h"
#include "suites/pair.h"

namespace tandem {

/// Of fp16: low enough that nothing overflows. (A function: GCC 12 leaves members uninitialized where a default member
/// initializer is itself a designated one.)
[[nodiscard]] inline LossScaleConfig low_loss_scale() {
  LossScaleConfig config;
  config.initial = 1024;
  return config;
}

/// A layout and what it is tried on. The model has no size that another divides where none must: vocabulary 61, 17 positions, 12
/// heads of 3, MLP 60, 11 rows of uneven length or several documents, biases and norm weights away from 0 and 1, dropout on.
struct ParallelVariant {
  ParallelDegrees degrees = {};
  PipelineConfig pipeline = {};
  bool sequence_parallel = false;
  int experts = 0;
  int choices = 1;
  bool tied = true;
  int micro_batches = 1;
  std::int64_t rows = 11;
  int layers = 2;
  std::int64_t vocabulary = 61;
  std::int64_t row_tokens = 17;  ///< of the batch; the model has 17 positions
  double dropout = 0.1;
  RowShape row_shape = RowShape::skewed;
  std::int64_t bucket_bytes = 0;
  std::string rank_order = "tensor-context-data-pipeline";
  std::string precision = "fp32";
  Initialization initialization = Initialization::scattered;
  bool sgd_step_only = false;
  RecomputeConfig recompute = {};
  std::string attention = "blocked";
  int zero_stage = 0;
  std::string offload = "none";
  std::string gradients = "wide";
  LossScaleConfig loss_scale = low_loss_scale();
  OptimizerKind optimizer = OptimizerKind::adamw;
  std::int64_t hidden = 36;
  int heads = 12;
  std::int64_t mlp_hidden = 60;
  OverlapConfig overlap = {};
};

[[nodiscard]] GptConfig model_of(const ParallelVariant& variant);
[[nodiscard]] TrainingPlan plan_of(const ParallelVariant& variant);
[[nodiscard]] PairInputs inputs_of(const ParallelVariant& variant, const RunContext& context);

/// What a case adds to the comparison: benefits and identities.
using PropertiesOf = std::function<std::vector<Property>(const PairInputs&, const EngineRun&)>;

/// The engine under the variant's layout against one rank of the reference; step programs proven; on failure the first bad
/// tensor.
[[nodiscard]] Case parallel_case(const std::string& suite, const std::string& name, const ParallelVariant& variant,
                                 const PropertiesOf& properties, bool quick = true);

/// Makes the plan without the option that a case is about.
using TwinOf = std::function<void(ParallelVariant&)>;

/// The engine without the option is the truth, to the last bit. `properties` are of the run with it, and may be empty.
[[nodiscard]] Case twin_case(const std::string& suite, const std::string& name, const std::string& summary,
                             const ParallelVariant& variant, const TwinOf& make_twin, const PropertiesOf& properties);

/// The technique's own lockstep reference against one rank of the reference, both in double: largest deviation of a gradient.
/// `lockstep` computes the whole gradients of a batch by name.
using LockstepGradients = std::function<std::map<std::string, std::vector<double>, std::less<>>(const PairInputs&, const Batch&)>;
[[nodiscard]] Property lockstep_agrees(const PairInputs& inputs, const LockstepGradients& lockstep);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/pitfall.h"
#include "optimized/scaling/cost_model.h"
#include "optimized/scaling/memory_model.h"
#include "optimized/scaling/workload.h"

namespace tandem {

/// Where the step of the slowest rank goes, in seconds; the parts add up to step_seconds exactly.
struct StepParts {
  double compute = 0;                                                  ///< products, attention, elementwise: forward and backward
  double recompute = 0;                                                ///< forward once more
  double tensor = 0, context = 0, expert = 0, pipeline = 0, data = 0;  ///< communication of these axes that nothing hides
  double bubble = 0;     ///< waiting for the pipeline's neighbours with nothing under way
  double optimizer = 0;  ///< norm and update
  double input = 0;      ///< waiting for training data
  [[nodiscard]] double communication() const noexcept { return tensor + context + expert + pipeline + data; }
  [[nodiscard]] double sum() const noexcept { return compute + recompute + communication() + bubble + optimizer + input; }
};

/// The parts by name, in the order of sum().
struct StepPart {
  const char* key;   ///< in files
  const char* name;  ///< in texts
  double StepParts::*seconds;
};
inline constexpr std::array<StepPart, 10> kStepParts = {{{"compute", "compute", &StepParts::compute},
                                                         {"recompute", "recomputation", &StepParts::recompute},
                                                         {"tensor", "tensor communication", &StepParts::tensor},
                                                         {"context", "context communication", &StepParts::context},
                                                         {"expert", "expert communication", &StepParts::expert},
                                                         {"pipeline", "pipeline communication", &StepParts::pipeline},
                                                         {"data", "data communication", &StepParts::data},
                                                         {"bubble", "bubble", &StepParts::bubble},
                                                         {"optimizer", "optimizer", &StepParts::optimizer},
                                                         {"input", "training data", &StepParts::input}}};

struct StepEstimate {
  double step_seconds = 0;
  StepParts parts;
  double hidden_communication_seconds = 0;  ///< behind computing
  double tokens_per_second = 0;             ///< of all devices
  double model_flops = 0;                   ///< of all devices and one step, AttentionFlops::full
  double model_flops_utilization = 0;       ///< model_flops / (step_seconds x devices x peak of the plan's precision)
  double hardware_flops_utilization = 0;    ///< what full recomputation does again counted too
  MemoryEstimate memory;
  double goodput = 1;      ///< useful share of the wall time, with the cluster's failures and checkpoints at the best interval
  std::string bottleneck;  ///< the largest part; recomputation counts as compute
};

struct SimulateOptions {
  /// Fault points: communication_counted_twice, recompute_counted_in_mfu, bubble_not_scaled_by_chunks,
  /// memory_of_last_stage_for_all (handed to estimate_memory), contention_ignored.
  PitfallSet pitfalls = {};
};

/// One step of the workload on the cluster: the engine's own schedule (optimized/pipeline_parallel/schedule.h) played in time by
/// discrete events, its slots priced by the cost model's operations layer by layer. Ranks that differ in data, tensor and context
/// coordinates alone do the same at the same time, so one of each pipeline stage is played. Schedules with more micro-batches
/// than needed to reach their steady state are played short and continued by their period, which is exact (tested). Where ranks
/// wait for the slowest one (NetworkLevel::jitter), that counts as data-parallel communication.
/// Throws InputError with the conflicts of a workload that cannot be.
[[nodiscard]] StepEstimate simulate(const Workload& workload, const ClusterSpec& cluster, const SimulateOptions& options = {});

}  // namespace tandem

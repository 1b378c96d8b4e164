// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "optimized/scaling/simulator.h"

namespace tandem {

struct PlanQuery {
  ModelShape model;
  ClusterSpec cluster;
  int devices = 8;
  std::int64_t global_batch_rows = 0;  ///< 0: usual_batch_rows()
  std::int64_t sequence = 0;           ///< 0: the model's
  std::string precision = {};          ///< empty: usual_precision()
  SoftwareTraits software;
  std::vector<std::string> schedules = {};  ///< of 1f1b, interleaved, zb-h1, zb-v those that the software has; empty: all
  /// Largest degree of data, tensor, pipeline, context, expert, where there is one: what the software does not have is 1.
  std::map<std::string, int> most = {};
  int top = 5;
  const std::atomic<bool>* stop = nullptr;  ///< ends the search; what it returns then means nothing
  [[nodiscard]] bool is_stopped() const noexcept { return stop != nullptr && *stop; }
};

/// Rows of a step of published runs, by the size of the model: 1/2, 1, 2, 3 or 6 Mi tokens up to 1, 5, 50, 300 billion parameters
/// and beyond (Brown et al. 2020; Narayanan et al. 2021: 1,536 rows of 2,048 for 175B, 3,072 for 1T), at least one.
[[nodiscard]] std::int64_t usual_batch_rows(const ModelShape& model, std::int64_t sequence);

/// bf16 where the device states a peak for it, otherwise fp16, otherwise fp32.
[[nodiscard]] std::string usual_precision(const ClusterSpec& cluster);

/// "tensor 8 x pipeline 16 x data 8"
[[nodiscard]] std::string degrees_text(const ParallelDegrees& degrees);

struct PlanCandidate {
  Workload workload;
  StepEstimate estimate;
  std::string why_not;  ///< why it lost against the one before it: "bubble 4.1 points more", "does not fit: 93.1 of 80 GiB"
};

/// One decision on the way of a rule of thumb.
struct PlanStep {
  std::string rule;    ///< "largest shard that fits: optimizer sharding over the data ranks"
  std::string choice;  ///< "tensor 8: the node"
  MemoryEstimate memory;
};
struct PlanPath {
  std::string name;  ///< "tuning path", "simple first"
  std::vector<PlanStep> steps;
  PlanCandidate result;
  double over_best = 0;  ///< its step seconds over the exhaustive best's; 0: it found nothing that fits
};

struct PlanReport {
  std::vector<PlanCandidate> best;  ///< the top K that fit, fastest first, no two with the same degrees
  std::vector<PlanPath> paths;      ///< the article's two orders of reasoning
  std::int64_t candidates = 0;      ///< legal layouts
  std::int64_t simulated = 0;       ///< of them; the rest is out of memory, or cannot beat the K-th by its lower bound
  std::int64_t out_of_memory = 0;   ///< of those that the search came to
  double seconds = 0;
  std::string nearest_miss;  ///< where nothing fits: the layout that needs least memory, and how much
};

/// All layouts that deal rows, sequences, heads and experts evenly: data x tensor x pipeline x context (x expert), chunks, rows
/// of a micro-batch, recomputation none, selective and full, ZeRO 0 to 3, sequence parallelism, schedules; each in memory and in
/// time. Of layouts with the same degrees the fastest alone is listed, of equally fast ones the simplest. They are taken up by
/// ascending lower bound of their step time, which is proven (planner_bound.h), and what cannot change the list any more is left
/// out: the result is that of trying all. Throws InputError where the query is not possible.
[[nodiscard]] PlanReport search_plans(const PlanQuery& query);

/// The plan with model, batch and degrees made small enough for this machine (core/model_shape.h small_twin), same techniques.
struct TwinRun {
  GptConfig model;
  TrainingPlan plan;
};
[[nodiscard]] TwinRun small_twin_of(const PlanCandidate& candidate, int most_ranks);

}  // namespace tandem

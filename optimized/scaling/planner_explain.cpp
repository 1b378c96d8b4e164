// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "optimized/scaling/planner_search.h"

namespace tandem {
namespace planner {
namespace {

constexpr double kGib = 1024.0 * 1024 * 1024;

}  // namespace

std::string memory_text(const MemoryEstimate& memory) {
  return fmt::format("needs {:.1f} GiB of {:.1f} GiB", memory.total() / kGib, memory.limit / kGib);
}

std::string why_slower(const StepEstimate& loser, const StepEstimate& winner) {
  const auto more = [&](const StepPart& part) { return loser.parts.*part.seconds - winner.parts.*part.seconds; };
  const StepPart& worst = *std::max_element(kStepParts.begin(), kStepParts.end(),
                                            [&](const StepPart& a, const StepPart& b) { return more(a) < more(b); });
  const double points = 100 * more(worst) / winner.step_seconds;
  if (points >= 0.05) return fmt::format("{} {:.1f} points more", worst.name, points);
  const double gib = (loser.memory.total() - winner.memory.total()) / kGib;
  if (gib >= 0.05) return fmt::format("as fast, and needs {:.1f} GiB more", gib);
  return "as fast";
}

std::string describe(const TrainingPlan& plan) {
  std::string text = degrees_text(plan.parallel);
  if (plan.parallel.pipeline > 1) text += fmt::format(", {}", plan.pipeline.effective_schedule());
  if (plan.pipeline.chunks > 1) text += fmt::format(" with {} chunks", plan.pipeline.chunks);
  const std::int64_t rows = micro_batch_rows(plan);
  text += fmt::format(", {} row{} a micro-batch", rows, rows == 1 ? "" : "s");
  if (plan.recompute.mode != "none") text += fmt::format(", recompute {}", plan.recompute.mode);
  if (plan.zero_stage > 0) text += fmt::format(", zero {}", plan.zero_stage);
  if (plan.sequence_parallel) text += ", sequence parallel";
  return text;
}

}  // namespace planner

std::string degrees_text(const ParallelDegrees& degrees) {
  const std::array<std::pair<const char*, int>, 5> axes = {{{"tensor", degrees.tensor},
                                                            {"pipeline", degrees.pipeline},
                                                            {"context", degrees.context},
                                                            {"data", degrees.data},
                                                            {"expert", degrees.expert}}};
  std::string text;
  for (const auto& [name, degree] : axes) {
    if (degree > 1) text += fmt::format("{}{} {}", text.empty() ? "" : " x ", name, degree);
  }
  return text.empty() ? "one device" : text;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "core/batch.h"
#include "optimized/scaling/planner_search.h"

namespace tandem::planner {
namespace {

constexpr double kGib = 1024.0 * 1024 * 1024;

struct NamedPart {
  const char* name;
  double StepParts::*part;
};
constexpr std::array<NamedPart, 11> kParts = {{{"compute", &StepParts::compute},
                                               {"recomputation", &StepParts::recompute},
                                               {"tensor communication", &StepParts::tensor},
                                               {"context communication", &StepParts::context},
                                               {"expert communication", &StepParts::expert},
                                               {"pipeline communication", &StepParts::pipeline},
                                               {"data communication", &StepParts::data},
                                               {"bubble", &StepParts::bubble},
                                               {"optimizer", &StepParts::optimizer},
                                               {"input", &StepParts::input},
                                               {"checkpoint", &StepParts::checkpoint}}};

void add_degree(std::string& text, const char* name, int degree) {
  if (degree > 1) text += fmt::format("{}{} {}", text.empty() ? "" : " x ", name, degree);
}

}  // namespace

std::string memory_text(const MemoryEstimate& memory) {
  return fmt::format("needs {:.1f} GiB of {:.1f} GiB", memory.total() / kGib, memory.limit / kGib);
}

std::string why_slower(const StepEstimate& loser, const StepEstimate& winner) {
  const NamedPart* worst = kParts.begin();
  const auto more = [&](const NamedPart& part) { return loser.parts.*part.part - winner.parts.*part.part; };
  for (const NamedPart& part : kParts) {
    if (more(part) > more(*worst)) worst = &part;
  }
  const double points = 100 * more(*worst) / winner.step_seconds;
  if (points >= 0.05) return fmt::format("{} {:.1f} points more", worst->name, points);
  const double gib = (loser.memory.total() - winner.memory.total()) / kGib;
  if (gib >= 0.05) return fmt::format("as fast, and needs {:.1f} GiB more", gib);
  return "as fast";
}

std::string describe(const TrainingPlan& plan) {
  std::string text;
  add_degree(text, "tensor", plan.parallel.tensor);
  add_degree(text, "pipeline", plan.parallel.pipeline);
  add_degree(text, "context", plan.parallel.context);
  add_degree(text, "data", plan.parallel.data);
  add_degree(text, "expert", plan.parallel.expert);
  if (text.empty()) text = "one device";
  if (plan.parallel.pipeline > 1) text += fmt::format(", {}", plan.pipeline.effective_schedule());
  if (plan.pipeline.chunks > 1) text += fmt::format(" with {} chunks", plan.pipeline.chunks);
  const std::int64_t rows = micro_batch_rows(plan.batch.rows, plan.parallel.data, 0, plan.batch.micro_batches, 0).size();
  text += fmt::format(", {} row{} a micro-batch", rows, rows == 1 ? "" : "s");
  if (plan.recompute.mode != "none") text += fmt::format(", recompute {}", plan.recompute.mode);
  if (plan.zero_stage > 0) text += fmt::format(", zero {}", plan.zero_stage);
  if (plan.sequence_parallel) text += ", sequence parallel";
  return text;
}

}  // namespace tandem::planner

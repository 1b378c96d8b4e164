// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/planner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/scaling/planner_search.h"

namespace tandem {
namespace planner {

bool PlanSearch::Found::before(const Found& other) const {
  if (estimate.step_seconds != other.estimate.step_seconds) return estimate.step_seconds < other.estimate.step_seconds;
  return layout < other.layout;
}

PlanSearch::PlanSearch(const PlanQuery& query)
    : query_(query), cost_(query.cluster), workload_(base_workload(query)), layouts_(all_layouts(query)) {
  for (const PlannedLayout& layout : layouts_) report_.candidates += zero_stages(layout);
}

void PlanSearch::sort_by_bound() {
  StepBound bound(query_, cost_);
  order_.reserve(layouts_.size());
  for (std::size_t i = 0; i < layouts_.size() && !query_.is_stopped(); ++i) {
    order_.emplace_back(bound.seconds(layouts_[i]), static_cast<std::uint32_t>(i));
  }
  std::sort(order_.begin(), order_.end());
}

double PlanSearch::limit_of(const PlannedLayout& layout) const {
  for (const Found& found : best_) {
    if (found.layout.same_degrees(layout)) return found.estimate.step_seconds;
  }
  return is_full() ? best_.back().estimate.step_seconds : std::numeric_limits<double>::infinity();
}

void PlanSearch::offer(Found found) {
  const auto same =
      std::find_if(best_.begin(), best_.end(), [&](const Found& other) { return other.layout.same_degrees(found.layout); });
  if (same != best_.end()) {
    if (!found.before(*same)) return;
    *same = std::move(found);
  } else {
    best_.push_back(std::move(found));
  }
  std::sort(best_.begin(), best_.end(), [](const Found& a, const Found& b) { return a.before(b); });
  if (std::ssize(best_) > query_.top) best_.pop_back();
}

void PlanSearch::try_stages(PlannedLayout layout, double bound) {
  for (int stage = 0; stage < zero_stages(layout); ++stage) {
    layout.zero = static_cast<std::uint8_t>(stage);
    apply(layout, workload_);
    const MemoryEstimate memory = estimate_memory(workload_, query_.cluster);
    if (!memory.fits()) {
      ++report_.out_of_memory;
      if (least_bytes_ == 0 || memory.total() < least_bytes_) {
        least_bytes_ = memory.total();
        least_memory_ = layout;
      }
      continue;
    }
    if (bound > limit_of(layout)) return;
    ++report_.simulated;
    offer({layout, simulate(workload_, query_.cluster)});
  }
}

void PlanSearch::run() {
  sort_by_bound();
  for (const auto& [bound, index] : order_) {
    if (query_.is_stopped()) break;
    if (is_full() && bound > best_.back().estimate.step_seconds) break;
    if (bound <= limit_of(layouts_[index])) try_stages(layouts_[index], bound);
  }
}

PlanReport PlanSearch::report() {
  for (const Found& found : best_) {
    apply(found.layout, workload_);
    PlanCandidate candidate{.workload = workload_, .estimate = found.estimate, .why_not = {}};
    if (!report_.best.empty()) candidate.why_not = why_slower(found.estimate, report_.best.back().estimate);
    report_.best.push_back(std::move(candidate));
  }
  if (best_.empty() && least_bytes_ > 0) {
    apply(least_memory_, workload_);
    report_.nearest_miss =
        fmt::format("{}: {}", describe(workload_.plan), memory_text(estimate_memory(workload_, query_.cluster)));
  }
  return std::move(report_);
}

}  // namespace planner

std::int64_t usual_batch_rows(const ModelShape& model, std::int64_t sequence) {
  const double parameters = num_parameters(model);
  const double mi_tokens = parameters < 1e9 ? 0.5 : parameters < 5e9 ? 1 : parameters < 5e10 ? 2 : parameters < 3e11 ? 3 : 6;
  return std::max<std::int64_t>(1, std::llround(mi_tokens * (1 << 20)) / sequence);
}

std::string usual_precision(const ClusterSpec& cluster) {
  for (const char* const precision : {"bf16", "fp16"}) {
    if (cluster.device.peak_flops.contains(precision)) return precision;
  }
  return "fp32";
}

PlanReport search_plans(const PlanQuery& query) {
  const auto begin = std::chrono::steady_clock::now();
  const PlanQuery whole = planner::completed(query);
  planner::PlanSearch search(whole);
  search.run();
  if (whole.is_stopped()) return {};
  PlanReport report = search.report();
  if (report.candidates == 0) {
    throw InputError(fmt::format("no layout deals {} heads, {} layers and {} rows to {} devices; change --gpus or --global-batch",
                                 whole.model.heads, whole.model.layers, whole.global_batch_rows, whole.devices));
  }
  report.paths = planner::rules_of_thumb(whole);
  for (PlanPath& path : report.paths) {
    if (!report.best.empty() && path.result.estimate.step_seconds > 0) {
      path.over_best = path.result.estimate.step_seconds / report.best.front().estimate.step_seconds;
      path.result.why_not = planner::why_slower(path.result.estimate, report.best.front().estimate);
    }
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// What compressed sums must satisfy, read from what went in and what came out.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>

#include <fmt/format.h>

#include "core/error.h"
#include "suites/compression_groups.h"

namespace tandem {
namespace {

constexpr double kUnit = 0x1p-24;  // unit roundoff of fp32

double norm(const Floats& values) {
  return std::sqrt(std::transform_reduce(values.begin(), values.end(), 0.0, std::plus<>(),
                                         [](float v) { return static_cast<double>(v) * static_cast<double>(v); }));
}

// Largest error that the law allows at an element: each of the roundings of N coded sums, sums and residuals is below kUnit times
// something that is in the bracket. Products of factors round by what the whole matrices are.
class Allowance {
 public:
  Allowance(const CompressionConfig& config, const GroupStep& at) : at_(at), ranks_(static_cast<double>(at.gradient.size())) {
    if (config.codec != "power_sgd") return;
    double size = 0;
    for (std::size_t n = 0; n < at.gradient.size(); ++n) size += norm(at.gradient[n]) + norm(at.residual_before[n]);
    of_matrix_ = 2 * kUnit * (config.rank + ranks_ + 4) * size;
  }

  [[nodiscard]] double at(std::size_t i) const {
    if (of_matrix_ > 0) return of_matrix_;
    double size = std::abs(at_.sum[i]) + std::abs(at_.sum_residual[i]) + std::abs(at_.sum_residual_before[i]);
    for (std::size_t n = 0; n < at_.gradient.size(); ++n) {
      size += std::abs(at_.gradient[n][i]) + std::abs(at_.residual_before[n][i]) + std::abs(at_.residual[n][i]);
    }
    return kUnit * (ranks_ + 2) * size;
  }

 private:
  const GroupStep& at_;
  double ranks_;
  double of_matrix_ = 0;
};

// sum + residuals' - gradients - residuals
double lost(const GroupStep& at, std::size_t i) {
  double loss = static_cast<double>(at.sum[i]) + at.sum_residual[i] - at.sum_residual_before[i];
  for (std::size_t n = 0; n < at.gradient.size(); ++n) {
    loss += static_cast<double>(at.residual[n][i]) - at.residual_before[n][i] - at.gradient[n][i];
  }
  return loss;
}

// Whether the exact codes left element i of this step exactly: every operation is repeated.
bool exact(const GroupStep& at, std::size_t i, bool sum_is_repeated) {
  float sum = 0;
  for (std::size_t n = 0; n < at.gradient.size(); ++n) {
    const float c = at.gradient[n][i] + at.residual_before[n][i];
    const float sent = c - at.residual[n][i];
    if (static_cast<double>(sent) + static_cast<double>(at.residual[n][i]) != static_cast<double>(c)) return false;
    sum = n == 0 ? sent : sum + sent;
  }
  return !sum_is_repeated || sum + at.sum_residual_before[i] == at.sum[i] + at.sum_residual[i];
}

bool unchanged(const GroupStep& at) { return at.residual == at.residual_before && at.sum_residual == at.sum_residual_before; }

bool is_exact(const std::string& codec) { return codec != "sign" && codec != "power_sgd"; }

}  // namespace

std::vector<Property> conserved_each_step(const CompressionScript& script, const CompressionRun& run, SumOrder order) {
  const CompressionConfig& config = script.inputs.plan.compression;
  // The other exact codes are decoded and added one by one, whatever brought them.
  const bool sum_is_repeated = order == SumOrder::ranks || config.codec != "random_k";
  Worst error, inexact, moved;
  double elements = 0;
  for_each_group_step(script, run, [&](const ReducingGroup& group, const GroupStep& at) {
    if (at.skipped) {
      moved.see(unchanged(at) ? 0 : 1, at, group);
      return;
    }
    const Allowance allowance(config, at);
    for (std::size_t i = 0; i < at.sum.size(); ++i) {
      const double limit = allowance.at(i), off = std::abs(lost(at, i));
      error.see(off == 0 ? 0 : limit > 0 ? off / limit : HUGE_VAL, at, group);
      inexact.see(is_exact(config.codec) && !exact(at, i, sum_is_repeated) ? 1 : 0, at, group);
    }
    elements += static_cast<double>(at.sum.size());
  });
  std::vector<Property> properties = {
      {"conservation_error", error.value, Relation::at_most, 1.0,
       fmt::format("sum + residuals after = gradients + residuals before, at each of {} elements and steps; in units of the "
                   "roundings of that step",
                   elements),
       error.step, error.tensor},
      {"residuals_moved_by_skipped_steps", moved.value, Relation::equal, 0.0, "bit for bit what they were", moved.step,
       moved.tensor}};
  if (is_exact(config.codec)) {
    properties.push_back({"elements_not_conserved_exactly", inexact.value, Relation::equal, 0.0,
                          "c = sent + residual has no rounding, and neither has s = sum + its residual", inexact.step,
                          inexact.tensor});
  }
  return properties;
}

Property conserved_in_total(const std::vector<const CompressionScript*>& scripts,
                            const std::vector<const CompressionRun*>& runs) {
  std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> totals;  // lost, allowed
  for (std::size_t s = 0; s < runs.size(); ++s) {
    const TrainingPlan& plan = scripts[s]->inputs.plan;
    TANDEM_CHECK(plan.parallel.tensor == 1 && plan.parallel.pipeline == 1 && plan.parallel.expert == 1, "whole tensors only");
    const std::size_t last = runs[s]->steps.front().size() - 1;
    for_each_group_step(*scripts[s], *runs[s], [&](const ReducingGroup& group, const GroupStep& at) {
      auto& [loss, limit] = totals[group.tensor.name];
      loss.resize(at.sum.size());
      limit.resize(at.sum.size());
      const CompressionStep& step = runs[s]->steps.front()[static_cast<std::size_t>(at.step - scripts[s]->first_step)];
      const Allowance allowance(plan.compression, at);
      const bool ends = s + 1 == runs.size() && step.step == runs[s]->steps.front()[last].step;
      for (std::size_t i = 0; i < at.sum.size(); ++i) {
        if (!at.skipped) {
          loss[i] += at.sum[i] / step.loss_scale;
          for (const Floats& gradient : at.gradient) loss[i] -= gradient[i] / step.loss_scale;
          limit[i] += allowance.at(i) / step.loss_scale;
        }
        if (!ends) continue;
        loss[i] += at.sum_residual[i] / step.loss_scale;
        for (const Floats& residual : at.residual) loss[i] += residual[i] / step.loss_scale;
      }
    });
  }
  Property worst{"conservation_error_in_total",
                 0,
                 Relation::at_most,
                 1.0,
                 "sums of all steps that were applied + residuals at the end = gradients of those steps; in units of the "
                 "roundings of all steps",
                 -1,
                 ""};
  for (const auto& [name, total] : totals) {
    for (std::size_t i = 0; i < total.first.size(); ++i) {
      const double off = std::abs(total.first[i]);
      const double error = off == 0 ? 0 : total.second[i] > 0 ? off / total.second[i] : HUGE_VAL;
      if (!(error <= worst.value)) std::tie(worst.value, worst.tensor) = std::tuple(error, name);
    }
  }
  return worst;
}

}  // namespace tandem

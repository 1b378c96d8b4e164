// SPDX-License-Identifier: Apache-2.0
// Compressed sums beside their definition, their bytes, and runs beside each other.
#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "suites/benefits.h"
#include "suites/compression_groups.h"
#include "suites/power_sgd_rounding.h"

namespace tandem {
namespace {

constexpr double kUnit = 0x1p-24;  // unit roundoff of fp32

bool has_nan(const Floats& values) {
  return std::ranges::find_if(values, [](float value) { return std::isnan(value); }) != values.end();
}

std::size_t differing(const Floats& a, const Floats& b) {
  if (a.size() != b.size()) return std::max(a.size(), b.size());
  std::size_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    count += std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i]) ? 1 : 0;
  }
  return count;
}

template <class Real>
void rescale(reference::ReductionState<Real>& state, double factor) {
  if (factor == 1) return;
  for (auto& residual : state.residuals) {
    for (Real& value : residual) value *= static_cast<Real>(factor);
  }
  for (Real& value : state.sum_residual) value *= static_cast<Real>(factor);
}

double distance(const std::vector<double>& truth, const std::vector<float>& values) {
  double squares = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) squares += std::pow(static_cast<double>(values[i]) - truth[i], 2);
  return std::sqrt(squares);
}

std::vector<std::vector<double>> widened(const std::vector<Floats>& values) {
  std::vector<std::vector<double>> wide;
  for (const Floats& of_rank : values) wide.emplace_back(of_rank.begin(), of_rank.end());
  return wide;
}

// The definition in fp32 beside one group's run; for power_sgd, whose products round in another order, in double too.
class Lockstep {
 public:
  Lockstep(const CompressionScript& script, const ReducingGroup& group)
      : config_(script.inputs.plan.compression),
        seed_(script.inputs.seed),
        group_(group),
        state_(reference::initial_reduction_state<float>(config_, seed_, group.tensor, static_cast<int>(group.ranks.size()))),
        wide_(reference::initial_reduction_state<double>(config_, seed_, group.tensor, static_cast<int>(group.ranks.size()))) {}

  // Elements of sum and residuals that are not the definition's.
  double exact_step(const GroupStep& at) {
    rescale(state_, at.scale_factor);
    const auto expected = reference::compressed_sum<float>(config_, seed_, at.step, group_.tensor, at.gradient, state_);
    // No code, no sum: everybody has to see that, and to skip the step.
    if (!expected.finite) return at.skipped && has_nan(at.sum) ? 0 : 1;
    double wrong = static_cast<double>(differing(at.sum, expected.sum));
    if (at.skipped) return wrong;
    state_ = expected.next;
    for (std::size_t n = 0; n < state_.residuals.size(); ++n) {
      wrong += static_cast<double>(differing(at.residual[n], state_.residuals[n]));
    }
    if (!state_.sum_residual.empty()) wrong += static_cast<double>(differing(at.sum_residual, state_.sum_residual));
    return wrong;
  }

  // Error over 4 sqrt(K) max(error of the definition in fp32, u S), both against double: the definition sums in double and rounds
  // once where sums of K terms are rounded here, and every such rounding grows through the factors as its own do. S is what
  // roundings are relative to (power_sgd_rounding()), of this step and, in residuals, of all before it: a residual is the
  // difference of a matrix and its approximation, and nothing but rounding where the factors hold the whole matrix.
  double rounded_step(const GroupStep& at) {
    rescale(state_, at.scale_factor);
    rescale(wide_, at.scale_factor);
    const double unit = at.scale_factor * at.scale_factor;
    rounding_.sum *= unit;
    for (double& square : rounding_.residuals) square *= unit;
    const std::vector<std::vector<double>> gradients = widened(at.gradient);
    const auto narrow = reference::compressed_sum<float>(config_, seed_, at.step, group_.tensor, at.gradient, state_);
    const auto truth = reference::compressed_sum<double>(config_, seed_, at.step, group_.tensor, gradients, wide_);
    if (!truth.finite || !narrow.finite) return at.skipped && has_nan(at.sum) ? 0 : HUGE_VAL;
    const PowerSgdRounding rounding = rounding_with(gradients);
    const auto over_bound = [&](const std::vector<double>& exact, const Floats& own, const Floats& engine, double square) {
      const auto length = static_cast<double>(std::max(group_.tensor.rows, group_.tensor.columns));
      const double error = distance(exact, engine);
      if (!std::isfinite(error)) return HUGE_VAL;
      return error == 0 ? 0 : error / (4 * std::sqrt(length) * std::max(distance(exact, own), kUnit * std::sqrt(square)));
    };
    double worst = over_bound(truth.sum, narrow.sum, at.sum, rounding.sum);
    if (at.skipped) return worst;
    state_ = narrow.next;
    wide_ = truth.next;
    for (std::size_t n = 0; n < wide_.residuals.size(); ++n) {
      worst = std::max(worst, over_bound(wide_.residuals[n], state_.residuals[n], at.residual[n], rounding.residuals[n]));
    }
    rounding_ = rounding;
    return worst;
  }

 private:
  // Of this step and all that were applied before it.
  [[nodiscard]] PowerSgdRounding rounding_with(std::vector<std::vector<double>> gradients) const {
    for (std::size_t n = 0; n < wide_.residuals.size(); ++n) {
      const std::vector<double>& residual = wide_.residuals[n];
      for (std::size_t i = 0; i < residual.size(); ++i) gradients[n][i] += residual[i];
    }
    PowerSgdRounding rounding = power_sgd_rounding(group_.tensor, gradients, wide_.start);
    rounding.sum += rounding_.sum;
    for (std::size_t n = 0; n < rounding_.residuals.size(); ++n) rounding.residuals[n] += rounding_.residuals[n];
    return rounding;
  }

  CompressionConfig config_;
  std::uint64_t seed_;
  ReducingGroup group_;
  reference::ReductionState<float> state_;
  reference::ReductionState<double> wide_;
  PowerSgdRounding rounding_;  // up to the last step that was applied, in the units of the last loss scale
};

}  // namespace

std::vector<Property> as_the_reference(const CompressionScript& script, const CompressionRun& run) {
  const bool bits = script.inputs.plan.compression.codec != "power_sgd";
  Worst worst;
  for (const ReducingGroup& group : reducing_groups(script.inputs)) {
    Lockstep lockstep(script, group);
    const bool factors = !bits && reference::has_factors(script.inputs.plan.compression, group.tensor);
    for (std::size_t i = 0; i < run.steps.front().size(); ++i) {
      const GroupStep at = group_step(run, group, i);
      worst.see(factors ? lockstep.rounded_step(at) : 2 * lockstep.exact_step(at), at, group);
    }
  }
  if (bits) {
    return {{"elements_unlike_the_reference", worst.value, Relation::equal, 0.0,
             "sums, residuals of gradients and of sums; reference/compressed_reduction.h in fp32 and rank order", worst.step,
             worst.tensor}};
  }
  return {{"error_over_bound", worst.value, Relation::at_most, 1.0,
           "sums and residuals against the definition in double: 4 sqrt(K) max(its own error in fp32, u S)", worst.step,
           worst.tensor}};
}

namespace {

double bytes_sent(const CompressionRun& run) {
  double sent = 0;
  for (const auto& rank : run.steps) {
    for (const CompressionStep& step : rank) sent += static_cast<double>(step.gradient_bytes);
  }
  return sent;
}

}  // namespace

Property bytes_as_programmed(const CompressionScript& script, const CompressionRun& run) {
  const std::int64_t of_step = facts_of(script.inputs).wire_bytes[static_cast<std::size_t>(Purpose::gradient)];
  return {"gradient_bytes_of_programs",
          bytes_sent(run),
          Relation::equal,
          static_cast<double>(of_step) * static_cast<double>(run.steps.front().size()),
          "step programs of all ranks, all steps",
          -1,
          ""};
}

std::vector<Property> fewer_bytes(const CompressionScript& script, const CompressionRun& run, double ratio,
                                  const std::string& derivation) {
  const double sent = bytes_sent(run);
  double expected = 0, plain = 0;
  CompressionConfig none;
  const auto steps = static_cast<std::int64_t>(run.steps.front().size());
  for (const ReducingGroup& group : reducing_groups(script.inputs)) {
    const auto ranks = static_cast<int>(group.ranks.size());
    expected += static_cast<double>(steps * reference::compressed_sum_bytes(script.inputs.plan.compression, group.tensor, ranks));
    plain += static_cast<double>(steps * reference::compressed_sum_bytes(none, group.tensor, ranks));
  }
  return {{"gradient_bytes_on_the_wire", sent, Relation::equal, expected,
           "reference/compressed_reduction.h: payloads of all tensors, all ranks and steps", -1, ""},
          {"compression_ratio", plain / sent, Relation::at_least, ratio, derivation, -1, ""}};
}

Property copies_agree(const CompressionRun& run) {
  std::map<std::string, std::set<std::uint64_t>> hashes;
  for (const auto& rank : run.steps) {
    for (const CompressionStep& step : rank) {
      for (const auto& [name, hash] : step.hashes) hashes[fmt::format("{} {}", step.step, name)].insert(hash);
    }
  }
  Property property{"copies_that_differ", 0, Relation::equal, 0.0, "parameters of all ranks after every step, by hash", -1, ""};
  for (const auto& [name, different] : hashes) {
    if (different.size() == 1) continue;
    property.value += 1;
    if (property.tensor.empty()) property.tensor = name;
  }
  return property;
}

Property goes_on_bitwise(const CompressionRun& whole, const CompressionRun& resumed) {
  Property property{"rank_steps_that_differ",
                    0,
                    Relation::equal,
                    0.0,
                    "loss, scale, sums, residuals and parameters of every later step",
                    -1,
                    ""};
  for (std::size_t rank = 0; rank < resumed.steps.size(); ++rank) {
    for (const CompressionStep& step : resumed.steps[rank]) {
      const auto at = std::ranges::find(whole.steps[rank], step.step, &CompressionStep::step);
      bool same = at != whole.steps[rank].end() && at->loss == step.loss && at->loss_scale == step.loss_scale &&
                  at->hashes == step.hashes && at->skipped == step.skipped && at->tensors.size() == step.tensors.size();
      for (const auto& [name, record] : step.tensors) {
        if (!same) break;
        const CodedRecord& other = at->tensors.at(name);
        same = differing(record.after, other.after) == 0 && differing(record.residual, other.residual) == 0;
        if (!same) property.tensor = name;
      }
      if (same) continue;
      property.value += 1;
      if (property.step < 0) property.step = static_cast<int>(step.step);
    }
  }
  return property;
}

}  // namespace tandem

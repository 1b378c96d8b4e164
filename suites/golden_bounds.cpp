// SPDX-License-Identifier: Apache-2.0
#include "suites/golden_bounds.h"

#include <algorithm>
#include <cmath>
#include <span>

#include <fmt/format.h>

#include "suites/golden_movement.h"
#include "suites/pair.h"

namespace tandem {
namespace {

constexpr double kDoubleTensorLimit = 1e-8;
constexpr double kDoubleSeriesLimit = 1e-9;
constexpr double kFloatFactor = 10.0;
constexpr double kFactor = 4.0;  // of expected errors, everywhere
constexpr const char* kSkipped = "skipped_steps";

bool is_summary(const Property& property) { return property.name.ends_with(" summary"); }
bool is_series(const Property& property) {
  return property.name == "loss" || property.name == "grad_norm" || property.name == "clip_coef";
}
bool is_of(const Property& property, const GoldenResults& results) { return property.name.starts_with(results.file); }

void limit_skipped(Property& property) {
  property.relation = Relation::equal;
  property.limit = 0;
  property.derivation =
      "the golden run skips no step; where gradients overflow at the initial scale, start lower: --set loss_scale_initial=...";
}

// ---- fp64 and fp32

double first_update_limit(const GoldenSet& set, const std::string& name) {
  const std::int64_t tokens = set.micro_batches * set.micro_batch_size * set.model.sequence;
  const auto longest = static_cast<double>(std::max({tokens, set.model.mlp_width(), set.model.vocabulary}));
  const double u = unit_roundoff(DType::f32);
  return first_update_movement(set, name, kFactor * u * std::sqrt(longest)) + u;
}

double series_float32_deviation(const GoldenSet& set, const Property& property) {
  return property.name == "loss" ? set.loss_float32_deviation : set.norm_float32_deviation;
}

const GoldenResults& results_of(const GoldenSet& set, const Property& property) {
  for (const GoldenResults* results :
       {&set.gradients_step0, &set.parameters_step1, &set.parameters_last, &set.first_moments_last, &set.second_moments_last}) {
    if (is_of(property, *results)) return *results;
  }
  throw ContractError("no result file is called " + property.name);
}

double wide_limit(const GoldenSet& set, bool is_double, const Property& property) {
  if (is_series(property)) return is_double ? kDoubleSeriesLimit : kFloatFactor * series_float32_deviation(set, property);
  const GoldenResults& results = results_of(set, property);
  if (is_double) {
    const bool stored_narrow = results.tensors.at(property.tensor).stored == DType::f32;
    return std::max(kDoubleTensorLimit, stored_narrow ? unit_roundoff(DType::f32) : 0.0);
  }
  const double limit = kFloatFactor * results.float32_deviation;
  if (&results == &set.parameters_step1) return std::max(limit, first_update_limit(set, property.tensor));
  // What the first update has moved stays moved.
  if (&results == &set.parameters_last)
    return std::max(limit, first_update_limit(set, property.tensor) + results.float32_deviation);
  return limit;
}

// ---- 16 bits and fewer

// Mean square relative error of rounding to nearest, in units of u^2. Numbers spread evenly over the logarithms of the binade
// from 1 to 2 have an absolute error evenly within u: u^2 / 3 times the mean of 1 / x^2, which is 3 / (8 ln 2).
double mean_square() { return 1 / (8 * std::log(2.0)); }

double square(double x) { return x * x; }

// sum of u^2 over the roundings on the way from a parameter to the logits, and from there back to the parameter.
struct RoundingSums {
  double forward = 0, backward = 0;
  double weights = 0;  // the part of both that is of weights at rest, which hardly change from step to step
};

RoundingSums rounding_sums(const GptConfig& model, const TrainingPlan& plan) {
  const Numerics& numerics = plan.numerics;
  const double layers = model.layers;
  RoundingSums sums;
  if (numerics.autocast()) {
    // Both operands of four products a layer and of the head; backward dy and W of each, and in the end x of one.
    sums.forward = (8 * layers + 2) * square(unit_roundoff(numerics.compute));
    sums.backward = sums.forward + square(unit_roundoff(numerics.compute));
    sums.weights = sums.forward;
    return sums;
  }
  // A layer: two norms, qkv, attention, two c_proj, c_fc, gelu, two residual sums; weights of two norms and four matrices. Ends:
  // wte, wpe, their sum; the last norm and its weight, head, logits. Backward: gradients of the same, weights again.
  const double rest = square(unit_roundoff(numerics.storage));
  const double probabilities = plan.attention == "materialized" ? layers : 0;
  sums.forward = (16 * layers + probabilities + 7) * rest;
  sums.backward = sums.forward;
  sums.weights = 2 * (6 * layers + 4) * rest;
  // A gradient that is kept in 16 bits is rounded with every micro-batch and rank that is added.
  if (is_16bit(numerics.accumulate)) sums.backward += (plan.batch.micro_batches + plan.parallel.data) * rest;
  if (!numerics.fp8) return sums;
  const double e4m3 = square(0x1p-4), e5m2 = square(0x1p-3);
  sums.forward += 8 * layers * e4m3;
  sums.backward += 4 * layers * (e4m3 + e5m2) + e4m3;
  sums.weights += 8 * layers * e4m3;
  return sums;
}

// Root mean square of the logits of an input that knows nothing of the head's rows: |h| rms(head), h of length sqrt(|w|^2 +
// |b|^2) with weight and bias of the last norm. The larger of before and after the run.
double logit_size(const GoldenSet& set) {
  const std::string head = set.model.tied ? "wte.weight" : "lm_head.weight";
  const auto size_of = [&](double weight, double bias, double matrix, double elements) {
    return std::sqrt(square(weight) + square(bias)) * matrix / std::sqrt(elements);
  };
  const auto norm = [&](const std::string& name) {
    double squares = 0;
    for (const float value : set.initial_parameters.at(name)) squares += square(value);
    return std::sqrt(squares);
  };
  const auto last = [&](const std::string& name) { return set.parameters_last.tensors.at(name).summary.l2_norm; };
  const auto elements = static_cast<double>(set.initial_parameters.at(head).size());
  return std::max(size_of(norm("ln_f.weight"), norm("ln_f.bias"), norm(head), elements),
                  size_of(last("ln_f.weight"), last("ln_f.bias"), last(head), elements));
}

double clip_limit(double norm_limit) { return norm_limit / (1 - std::min(norm_limit, 0.9)); }

double tokens_of_a_step(const GoldenSet& set, std::size_t step) { return static_cast<double>(set.batches[step].valid_tokens()); }

// A summary has the largest element alone: of n independent errors the largest is about sqrt(2 ln n) times as large as their rms.
double of_summary(const GoldenSet& set, const Property& property) {
  if (!is_summary(property)) return 1.0;
  const auto elements = static_cast<double>(set.initial_parameters.at(property.tensor).size());
  return std::sqrt(std::max(1.0, 2 * std::log(elements)));
}

// What gradients with these errors allow; for all files but that of the gradients.
double moved_limit(const GoldenSet& set, const GoldenMovement& movement, const Property& property) {
  const GoldenResults& results = results_of(set, property);
  const double master = unit_roundoff(DType::f32) * std::sqrt(static_cast<double>(set.steps));
  const auto moved = [&](const std::map<std::string, double>& whole, const std::map<std::string, double>& summary) {
    return (is_summary(property) ? summary : whole).at(property.tensor) + master;
  };
  if (&results == &set.parameters_step1) return moved(movement.parameters_step1, movement.summary_step1);
  if (&results == &set.parameters_last) return moved(movement.parameters_last, movement.summary_last);
  const auto& moments = &results == &set.first_moments_last ? movement.first_moments : movement.second_moments;
  return moments.at(property.tensor) * of_summary(set, property);
}

// Limits a priori.
class Prior {
 public:
  Prior(const GoldenSet& set, const TrainingPlan& plan)
      : set_(set), expected_(expected_rounding_errors(set.model, plan)), logits_(logit_size(set)) {
    for (const ParameterSpec& spec : gpt_parameters(set.model)) errors_[spec.name] = kFactor * expected_.gradients;
    movement_ = golden_movement(set, errors_, expected_.persistent);
  }

  [[nodiscard]] double limit(const Property& property) const {
    if (is_series(property)) return series(property, 1.0);
    if (is_of(property, set_.gradients_step0)) return errors_.at(property.tensor) * of_summary(set_, property);
    return moved_limit(set_, movement_, property);
  }

  // With the part that is random over tokens divided by sqrt(tokens).
  [[nodiscard]] double averaged(const Property& property) const {
    return series(property, std::sqrt(tokens_of_a_step(set_, static_cast<std::size_t>(property.step))));
  }

  [[nodiscard]] const GradientErrors& errors() const { return errors_; }
  [[nodiscard]] double persistent() const { return expected_.persistent; }

 private:
  [[nodiscard]] double series(const Property& property, double averaged_over) const {
    const auto step = static_cast<std::size_t>(property.step);
    if (property.name == "loss") {
      return kFactor * expected_.loss * logits_ / set_.losses[step] / averaged_over + movement_.loss[step];
    }
    const double norm = kFactor * expected_.gradients * movement_.growth[step] / averaged_over;
    return property.name == "clip_coef" ? clip_limit(norm) : norm;
  }

  const GoldenSet& set_;
  RoundingErrors expected_;
  double logits_;
  GradientErrors errors_;
  GoldenMovement movement_;
};

}  // namespace

RoundingErrors expected_rounding_errors(const GptConfig& model, const TrainingPlan& plan) {
  const RoundingSums sums = rounding_sums(model, plan);
  const double all = sums.forward + sums.backward;
  return {std::sqrt(mean_square() * sums.forward), std::sqrt(mean_square() * all), sums.weights / all};
}

std::vector<Property> golden_deviations(const GoldenSet& set, const GoldenRun& run) {
  std::vector<Property> all;
  const auto series = [&](const std::string& name, const std::vector<double>& values, const std::vector<double>& expected) {
    for (std::size_t step = 0; step < expected.size(); ++step) {
      const double error = std::abs(values[step] - expected[step]) / std::abs(expected[step]);
      all.push_back({name, error, Relation::at_most, 0, "", static_cast<int>(step), name});
    }
  };
  const auto results = [&](const GoldenResults& expected, const GoldenRun::Tensors& actual, int step) {
    for (const ParameterSpec& spec : gpt_parameters(set.model)) {
      const GoldenTensor& tensor = expected.tensors.at(spec.name);
      const std::span<const double> values(actual.at(spec.name));
      all.push_back(
          {expected.file, golden_deviation<double>(tensor, spec.name, values), Relation::at_most, 0, "", step, spec.name});
      all.push_back({expected.file + " summary", golden_summary_deviation<double>(tensor, spec.name, values), Relation::at_most,
                     0, "", step, spec.name});
    }
  };
  series("loss", run.losses, set.losses);
  series("grad_norm", run.norms, set.gradient_norms);
  series("clip_coef", run.coefficients, set.clip_coefficients);
  const int last = static_cast<int>(set.steps) - 1;
  results(set.gradients_step0, run.gradients_step0, 0);
  results(set.parameters_step1, run.parameters_step1, 0);
  results(set.parameters_last, run.parameters_last, last);
  results(set.first_moments_last, run.first_moments, last);
  results(set.second_moments_last, run.second_moments, last);
  all.push_back({kSkipped, static_cast<double>(run.skipped_steps), Relation::equal, 0, "", -1, ""});
  limit_skipped(all.back());
  return all;
}

void limit_wide(const GoldenSet& set, const Numerics& numerics, std::vector<Property>& deviations) {
  const bool is_double = numerics.storage == DType::f64;
  for (Property& property : deviations) {
    if (property.name == kSkipped) continue;
    property.limit = wide_limit(set, is_double, property);
    property.derivation =
        is_double
            ? "fp64: 1e-9 in loss and norm, 1e-8 in tensors"
            : "fp32: ten times the set's float32_deviation; after the first update at least what such a gradient error moves";
  }
}

void limit_narrow_reference(const GoldenSet& set, const TrainingPlan& plan, std::vector<Property>& deviations) {
  const Prior prior(set, plan);
  for (Property& property : deviations) {
    if (property.name == kSkipped) continue;
    property.limit = prior.limit(property);
    property.derivation = fmt::format("a priori in {}: four times what independent roundings add up to", plan.precision);
  }
}

void limit_narrow_engine(const GoldenSet& set, const TrainingPlan& plan, const std::vector<Property>& reference,
                         std::vector<Property>& deviations) {
  TANDEM_CHECK(reference.size() == deviations.size(), "the yardstick must be of the same set");
  const Prior prior(set, plan);
  const double u = candidate_roundoff(plan);
  GradientErrors errors = prior.errors();
  for (const Property& property : reference) {
    if (!is_of(property, set.gradients_step0) || is_summary(property)) continue;
    double& error = errors.at(property.tensor);
    error = std::min(error, kFactor * std::max(property.value, u));
  }
  const GoldenMovement movement = golden_movement(set, errors, prior.persistent());
  double largest = 0;  // error of the reference in the series so far
  for (std::size_t i = 0; i < deviations.size(); ++i) {
    Property& property = deviations[i];
    const Property& yardstick = reference[i];
    if (property.name == kSkipped) continue;
    // One number may be right by luck, a whole tensor is not: what it is wrong by (the property before) bounds its summary.
    const double error = is_summary(property) ? std::max(yardstick.value, reference[i - 1].value) : yardstick.value;
    double limit = 0;
    if (is_series(property)) {
      largest = property.step == 0 ? yardstick.value : std::max(largest, yardstick.value);
      limit = std::max(kFactor * largest, prior.averaged(property));
    } else if (is_of(property, set.gradients_step0)) {
      limit = std::max(kFactor * error, errors.at(property.tensor) * of_summary(set, property));
    } else if (is_of(property, set.first_moments_last) || is_of(property, set.second_moments_last)) {
      limit = std::max(kFactor * error, moved_limit(set, movement, property));
    } else {
      limit = HUGE_VAL;  // parameters: which element takes its update the wrong way is luck, on either side
    }
    property.limit = std::min(limit, prior.limit(property));
    property.derivation =
        fmt::format("4 x the error {:.2e} of the reference in {}, or what roundings alone explain", error, plan.precision);
  }
}

}  // namespace tandem

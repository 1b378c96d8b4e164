// SPDX-License-Identifier: Apache-2.0
// Whole training runs against recorded ones of an outside program, and proof that known mistakes would not pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include <fmt/format.h>

#include "core/dtype.h"
#include "core/io/golden_set.h"
#include "reference/test_support.h"
#include "reference/training.h"

namespace tandem::reference {
namespace {

constexpr double kTraceTolerance = 1e-9;
constexpr double kTensorTolerance = 1e-8;

TrainingRun run_of(const GoldenSet& set) {
  TrainingRun run;
  run.model = set.model;
  run.optimizer = set.optimizer;
  run.layout = {1, static_cast<int>(set.micro_batches)};
  run.steps = set.steps;
  run.batch = [&set](std::int64_t step) { return set.batches[static_cast<std::size_t>(step)]; };
  return run;
}

template <class Real>
NamedTensors<Real> initial_of(const GoldenSet& set) {
  NamedTensors<Real> parameters;
  for (const auto& [name, values] : set.initial_parameters) parameters[name] = {values.begin(), values.end()};
  return parameters;
}

double largest_relative(const std::vector<double>& got, const std::vector<double>& expected) {
  double largest = got.size() == expected.size() ? 0.0 : NAN;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(got[i] / expected[i] - 1.0);
    if (!(error <= largest)) largest = error;
  }
  return largest;
}

struct Worst {
  double deviation = 0.0;
  std::string tensor;
};

/// Largest deviation of any tensor of a result file, of what is stored and of the summary of the whole.
template <class Real>
Worst worst_of(const GoldenResults& expected, const NamedTensors<Real>& got) {
  Worst worst;
  for (const auto& [name, tensor_expected] : expected.tensors) {
    const std::span<const Real> values = tensor(got, name);
    for (const double deviation :
         {golden_deviation<Real>(tensor_expected, name, values), golden_summary_deviation<Real>(tensor_expected, name, values)}) {
      if (!(deviation <= worst.deviation)) worst = {deviation, name};
    }
  }
  return worst;
}

/// A set's result file together with what a run left of it.
template <class Real>
using Compared = std::vector<std::pair<const GoldenResults*, const NamedTensors<Real>*>>;

template <class Real>
Compared<Real> compared(const GoldenSet& set, const TrainingRecord<Real>& record) {
  return {{&set.gradients_step0, &record.gradients_step0},
          {&set.parameters_step1, &record.parameters_step1},
          {&set.parameters_last, &record.parameters},
          {&set.first_moments_last, &record.optimizer.m},
          {&set.second_moments_last, &record.optimizer.v}};
}

class GoldenRun : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(golden_folder(GetParam()))) {
      GTEST_SKIP() << "no golden set at " << golden_folder(GetParam()).string();
    }
    set_ = read_golden_set(golden_folder(GetParam()));
  }
  GoldenSet set_;
};

TEST_P(GoldenRun, MatchesInDouble) {
  const TrainingRecord<double> record = train<double>(run_of(set_), initial_of<double>(set_));

  EXPECT_LE(largest_relative(record.losses, set_.losses), kTraceTolerance);
  EXPECT_LE(largest_relative(record.gradient_norms, set_.gradient_norms), kTraceTolerance);
  EXPECT_LE(largest_relative(record.clip_coefficients, set_.clip_coefficients), kTraceTolerance);
  for (const auto& [expected, got] : compared(set_, record)) {
    // Where the file is float32, what it stores is rounded.
    const double tolerance = kTensorTolerance + unit_roundoff(expected->tensors.begin()->second.stored);
    const Worst worst = worst_of(*expected, *got);
    EXPECT_LE(worst.deviation, tolerance) << expected->file << ": " << worst.tensor;
    RecordProperty(expected->file, fmt::format("{:.3g}", worst.deviation));
  }
}

TEST_P(GoldenRun, MatchesInFloatWithinTenTimesTheStatedDeviation) {
  const TrainingRecord<float> record = train<float>(run_of(set_), initial_of<float>(set_));

  EXPECT_LE(largest_relative(record.losses, set_.losses), 10 * set_.loss_float32_deviation);
  EXPECT_LE(largest_relative(record.gradient_norms, set_.gradient_norms), 10 * set_.norm_float32_deviation);
  for (const auto& [expected, got] : compared(set_, record)) {
    const Worst worst = worst_of(*expected, *got);
    EXPECT_LE(worst.deviation, 10 * expected->float32_deviation) << expected->file << ": " << worst.tensor;
    RecordProperty(expected->file, fmt::format("{:.3g}", worst.deviation / expected->float32_deviation));
  }
}

TEST_P(GoldenRun, MatchesOnThreeLockstepRanks) {
  TrainingRun run = run_of(set_);
  run.layout = {3, 2};
  const TrainingRecord<double> record = train<double>(run, initial_of<double>(set_));

  EXPECT_LE(largest_relative(record.losses, set_.losses), kTraceTolerance);
  const Worst worst = worst_of(set_.parameters_last, record.parameters);
  EXPECT_LE(worst.deviation, kTensorTolerance) << worst.tensor;
}

INSTANTIATE_TEST_SUITE_P(Sets, GoldenRun, testing::Values("tiny", "odd", "deep", "varlen"),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace tandem::reference

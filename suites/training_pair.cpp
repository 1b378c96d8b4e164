// SPDX-License-Identifier: Apache-2.0
// The training loop beside the reference's: seeds, schedule, batches and counters reach the engine as the configuration has them.
#include <cmath>

#include <fmt/format.h>

#include "optimized/training/trainer.h"
#include "suites/kept_training.h"
#include "suites/one_step.h"
#include "suites/parallel_cases.h"
#include "suites/training_cases.h"

namespace tandem {
namespace {

constexpr std::int64_t kSteps = 4;

TrainOptions options_of(const PairInputs& inputs, const RunContext& context) {
  TrainOptions options;
  options.config = run_config_of(inputs);
  options.config.evaluate_every_steps = 0;
  options.data = inputs.data.get();
  options.poison = true;
  options.pitfalls = context.pitfalls;
  options.backend = context.backend;
  return options;
}

}  // namespace

Case training_pair_case() {
  const ParallelVariant variant{.degrees = {.data = 2}, .micro_batches = 2, .precision = "fp64"};
  Case result;
  result.suite = "training";
  result.name = "training/pair/fp64";
  result.model = model_of(variant);
  result.plan = plan_of(variant);
  result.criterion = Criterion::convergence;
  result.summary = "losses and gradient norms of the training loop with dropout: the reference's, step by step";
  result.execute = [variant](const RunContext& context) {
    PairInputs inputs = inputs_of(variant, context);
    inputs.steps = kSteps;
    const auto truth_record = kept_training<double>(reference_run(inputs));
    const reference::TrainingRecord<double>& truth = *truth_record;
    const TrainReport report = train(options_of(inputs, context));
    CaseEvidence evidence;
    for (std::size_t i = 0; i < kSteps; ++i) {
      const auto add = [&](const char* what, double found, double expected) {
        evidence.properties.push_back({fmt::format("{}_error of step {}", what, i), std::fabs(found / expected - 1),
                                       Relation::at_most, 1e-10, "fp64 rounding of sums in another order, through three updates",
                                       -1, ""});
      };
      add("loss", report.steps.at(i).loss, truth.losses.at(i));
      add("gradient_norm", report.steps.at(i).gradient_norm, truth.gradient_norms.at(i));
    }
    return evidence;
  };
  return result;
}

}  // namespace tandem

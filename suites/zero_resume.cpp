// SPDX-License-Identifier: Apache-2.0
// Sharded runs are saved, evaluated and continued as any other.
#include <cmath>

#include <fmt/format.h>

#include "optimized/checkpoint/checkpoint.h"
#include "optimized/training/trainer.h"
#include "suites/scratch_folder.h"
#include "suites/zero_cases.h"

namespace tandem {
namespace {

constexpr std::int64_t kSavedAfter = 3;
constexpr std::int64_t kSteps = 6;

RunConfig config_of(const ParallelVariant& variant, const RunContext& context) {
  RunConfig config = run_config_of(inputs_of(variant, context));
  config.steps = kSteps;
  config.evaluate_every_steps = 1;
  config.evaluate_batches = 2;
  return config;
}

TrainOptions options_of(const ParallelVariant& variant, const RunContext& context, const BatchSource& data) {
  TrainOptions options;
  options.config = config_of(variant, context);
  options.data = &data;
  options.data_name = "synthetic";
  options.poison = true;
  options.pitfalls = context.pitfalls;
  options.backend = context.backend;
  return options;
}

// Steps after the checkpoint in which the runs differ, and by how much: losses, norms, losses of evaluations.
struct Difference {
  double steps = 0;
  double largest = 0;
};

Difference difference_of(const TrainReport& whole, const TrainReport& rest) {
  Difference difference;
  if (rest.first_step != kSavedAfter || rest.steps.size() != kSteps - kSavedAfter) return {kSteps, std::nan("")};
  for (std::size_t i = 0; i < rest.steps.size(); ++i) {
    const StepResult& expected = whole.steps[i + kSavedAfter];
    const double evaluated = rest.validation_losses.at(i).second / whole.validation_losses.at(i + kSavedAfter).second;
    double worst = 0;
    for (const double ratio :
         {rest.steps[i].loss / expected.loss, rest.steps[i].gradient_norm / expected.gradient_norm, evaluated}) {
      if (!(std::abs(ratio - 1) <= worst)) worst = std::abs(ratio - 1);
    }
    difference.steps += worst == 0 ? 0 : 1;
    if (!(worst <= difference.largest)) difference.largest = worst;
  }
  return difference;
}

// Runs to the end under `before`, interrupted after step kSavedAfter by a second run, which saves; `after` goes on.
TrainReport interrupted_and_continued(const ParallelVariant& before, const ParallelVariant& after, const RunContext& context,
                                      const BatchSource& data) {
  const ScratchFolder scratch("zero-resume");
  std::atomic<bool> stop = false;
  TrainOptions first = options_of(before, context, data);
  first.output = scratch.path();
  first.stop = &stop;
  first.on_step = [&](std::int64_t step, const StepResult&, double) { stop = step + 1 == kSavedAfter; };
  static_cast<void>(train(first));
  TrainOptions second = options_of(after, context, data);
  second.resume = find_checkpoint(scratch.path());
  return train(second);
}

Case resume_case(const std::string& name, const ParallelVariant& before, const ParallelVariant& after, double bound,
                 const std::string& derivation) {
  Case result;
  result.suite = "zero";
  result.name = "zero/resume/" + name;
  result.model = model_of(before);
  result.plan = plan_of(before);
  result.criterion = Criterion::convergence;
  result.summary =
      fmt::format("interrupted under {}, continued under {}: the losses, norms and evaluations of a run that was not",
                  describe_layout(result.plan), describe_layout(plan_of(after)));
  result.execute = [=](const RunContext& context) {
    const std::shared_ptr<const BatchSource> data = inputs_of(before, context).data;
    const TrainReport whole = train(options_of(before, context, *data));
    const Difference difference = difference_of(whole, interrupted_and_continued(before, after, context, *data));
    CaseEvidence evidence;
    if (bound == 0) {
      evidence.properties.push_back({"steps_that_differ", difference.steps, Relation::equal, 0.0, derivation, -1, ""});
    } else {
      evidence.properties.push_back(
          {"largest_relative_difference", difference.largest, Relation::at_most, bound, derivation, -1, ""});
    }
    return evidence;
  };
  return result;
}

// What every stage computes in an evaluation is what one rank computes.
Case evaluation_case() {
  const ParallelVariant shown{.degrees = {.data = 3}, .layers = 3, .precision = "fp64", .zero_stage = 3};
  Case result;
  result.suite = "zero";
  result.name = "zero/evaluation/fp64";
  result.model = model_of(shown);
  result.plan = plan_of(shown);
  result.criterion = Criterion::convergence;
  result.summary = "validation losses between the steps of stages 1 to 3 on three ranks: those of one rank";
  result.execute = [shown](const RunContext& context) {
    const std::shared_ptr<const BatchSource> data = inputs_of(shown, context).data;
    ParallelVariant one_rank = shown;
    one_rank.degrees = {};
    one_rank.zero_stage = 0;
    const TrainReport truth = train(options_of(one_rank, context, *data));
    CaseEvidence evidence;
    for (const int stage : {1, 2, 3}) {
      ParallelVariant variant = shown;
      variant.zero_stage = stage;
      const TrainReport report = train(options_of(variant, context, *data));
      double worst = 0;
      for (std::size_t i = 0; i < kSteps; ++i) {
        const double error = std::abs(report.validation_losses.at(i).second / truth.validation_losses.at(i).second - 1);
        if (!(error <= worst)) worst = error;
      }
      evidence.properties.push_back({fmt::format("validation_loss_error stage {}", stage), worst, Relation::at_most, 1e-10,
                                     "fp64 rounding of sums in another order, through six updates", -1, ""});
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_zero_resume_cases(CaseList& cases) {
  const std::string same_bits = "reduced once a step in rank order by every stage, so that no bit depends on who keeps what";
  const std::string rounding = "fp64 rounding of sums in another order, through six updates";
  const ParallelVariant sharded{.degrees = {.data = 3}, .layers = 3, .precision = "bf16", .zero_stage = 3};
  ParallelVariant unsharded = sharded;
  unsharded.zero_stage = 0;
  ParallelVariant offloaded = sharded;
  offloaded.zero_stage = 2;
  offloaded.offload = "optimizer";
  cases.push_back(resume_case("stage3/bf16", sharded, sharded, 0, same_bits));
  cases.push_back(resume_case("stage3-to-0/bf16", sharded, unsharded, 0, same_bits));
  cases.push_back(resume_case("stage0-to-3/bf16", unsharded, sharded, 0, same_bits));
  cases.push_back(resume_case("stage3-to-2/offload/bf16", sharded, offloaded, 0, same_bits));
  ParallelVariant wide = sharded;
  wide.precision = "fp64";
  ParallelVariant tensor = wide;
  tensor.zero_stage = 2;
  tensor.degrees = {.data = 2, .tensor = 2};
  cases.push_back(resume_case("stage3-to-2/tensor2/fp64", wide, tensor, 1e-10, rounding));
  ParallelVariant seven = wide;
  seven.zero_stage = 1;
  seven.degrees = {.data = 7};
  cases.push_back(resume_case("stage3-to-1/ranks7/fp64", wide, seven, 1e-10, rounding));
  cases.push_back(evaluation_case());
}

}  // namespace tandem

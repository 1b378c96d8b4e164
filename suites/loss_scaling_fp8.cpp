// SPDX-License-Identifier: Apache-2.0
// Eight-bit operands of linear layers: scales that ranks agree on, and what a training run loses.
#include <algorithm>
#include <cmath>
#include <memory>

#include <fmt/format.h>

#include "core/synthetic_corpus.h"
#include "optimized/training/trainer.h"
#include "suites/loss_scaling_cases.h"
#include "suites/loss_scaling_run.h"

namespace tandem {
namespace {

using Values = std::vector<double>;

// ---- agreement

Case agreement_case() {
  const ParallelVariant variant{.degrees = {.data = 3}, .precision = "fp8"};
  Case result = loss_scaling_case("fp8/scales_agreed", "all ranks quantise with one scale, that of the largest value anywhere",
                                  Criterion::convergence, variant);
  result.execute = [variant](const RunContext& context) {
    Script script;
    script.inputs = inputs_of(variant, context);
    script.inputs.steps = 4;
    const ScriptedRun run = run_script(script, context, "fp8");
    ParallelVariant alone = variant;
    alone.degrees.data = 1;
    Script whole;
    whole.inputs = inputs_of(alone, context);
    whole.inputs.steps = 1;
    const ScriptedRun one = run_script(whole, context, "fp8");
    double differing = 0;
    const Values& here = run.steps.front().front().fp8.histories;
    const Values& there = one.steps.front().front().fp8.histories;
    // Gradients are sums whose order differs; inputs and weights of one row do not depend on the others.
    for (std::size_t i = 0; i < here.size(); ++i) differing += std::fabs(here[i] - there[i]) > 0x1p-6 * there[i] ? 1 : 0;
    CaseEvidence evidence;
    evidence.properties = {ranks_agree(run),
                           {"largest_values_unlike_one_rank's", differing, Relation::equal, 0.0,
                            "after step 0: those of the whole batch, a few bf16 roundings apart", 0, ""}};
    return evidence;
  };
  return result;
}

// Validation must leave no trace in the histories: a run would depend on when it was evaluated.
Case evaluation_case() {
  const ParallelVariant variant{.degrees = {.data = 2}, .precision = "fp8"};
  Case result =
      loss_scaling_case("fp8/evaluation", "evaluating between steps changes no bit of the training", Criterion::bitwise, variant);
  result.execute = [variant](const RunContext& context) {
    Script script;
    script.inputs = inputs_of(variant, context);
    script.inputs.steps = 4;
    ScriptedRun plain = run_script(script, context, "without evaluation");
    double loss = 0;
    script.before_step = [&](Engine& engine, std::int64_t step) {
      Batch batch = *script.inputs.data->validation_batch(step, variant.rows);
      const double found = engine.evaluate(batch);
      if (engine.groups().rank() == 0) loss = found;
    };
    ScriptedRun evaluated = run_script(script, context, "evaluated before every step");
    CaseEvidence evidence;
    double differing = 0;
    for (std::size_t i = 0; i < plain.steps.front().size(); ++i) {
      differing += plain.steps.front()[i].fp8 == evaluated.steps.front()[i].fp8 ? 0 : 1;
    }
    evidence.properties = {{"histories_that_differ", differing, Relation::equal, 0.0, "of training steps alone", -1, ""},
                           {"validation_loss", loss, Relation::at_most, 2 * std::log(61.0),
                            "it was evaluated: a number, below twice that of guessing", -1, ""}};
    evidence.truth = std::move(plain.evidence);
    evidence.candidate = std::move(evaluated.evidence);
    return evidence;
  };
  return result;
}

// ---- training

RunConfig convergence_config(const std::string& precision, const RunContext& context, std::uint64_t seed, std::int64_t steps) {
  RunConfig config;
  config.model = {.vocabulary = 32, .sequence = 32, .layers = 1, .hidden = 48, .heads = 3};
  config.plan.precision = precision;
  config.plan.numerics = numerics_from_precision(precision);
  config.plan.parallel.data = 2;
  config.plan.batch = {32, 1};
  config.plan.threads_per_rank = context.threads_per_rank;
  config.optimizer.learning_rate = 1e-2;
  config.optimizer.weight_decay = 0;
  config.schedule = {ScheduleKind::cosine, 20, 0, 0.05};
  config.steps = steps;
  config.evaluate_every_steps = 0;
  config.evaluate_batches = 16;
  config.seed = seed;
  return config;
}

struct Trained {
  double loss = 0;
  double skipped = 0;
  double floor = 0;
};

Trained trained(const std::string& precision, const RunContext& context, std::uint64_t seed, std::int64_t steps) {
  TrainOptions options;
  options.config = convergence_config(precision, context, seed, steps);
  const GptConfig& model = options.config.model;
  const SyntheticCorpus corpus({.vocabulary = model.vocabulary, .sequence = model.sequence, .seed = seed});
  options.data = &corpus;
  options.poison = true;
  options.record_timeline = false;
  options.pitfalls = context.pitfalls;
  options.backend = context.backend;
  const TrainReport report = train(options);
  const auto skipped = std::ranges::count_if(report.steps, [](const StepResult& step) { return step.skipped; });
  return {report.validation_losses.back().second, static_cast<double>(skipped), corpus.entropy_rate_nats()};
}

// The floor is the entropy of the source: what a precision loses shows in the excess over it.
Case convergence_case(int seeds, std::int64_t steps, bool quick) {
  Case result = loss_scaling_case(fmt::format("convergence/seeds{}", seeds), "bf16, fp16 and fp8 end where fp32 does",
                                  Criterion::convergence, {.degrees = {.data = 2}, .precision = "fp8"}, quick);
  result.model = convergence_config("fp8", {}, 1, steps).model;
  result.plan = convergence_config("fp8", {}, 1, steps).plan;
  result.execute = [seeds, steps](const RunContext& context) {
    CaseEvidence evidence;
    for (int i = 0; i < seeds; ++i) {
      const std::uint64_t seed = context.seed + static_cast<std::uint64_t>(i);
      const Trained wide = trained("fp32", context, seed, steps);
      for (const std::string precision : {"bf16", "fp16", "fp8"}) {
        const Trained narrow = trained(precision, context, seed, steps);
        // A logit of size 2 that is wrong by a share e costs (2 e)^2 / 2 nats, as losses go near their minimum: e is about 0.05
        // with fp8 operands (the case fp8/products), 0.01 with a dozen roundings to bf16. That is 0.005 and 0.0002 nats; twice as
        // much, over a loss of 2 nats, for what the way there adds.
        const double limit = precision == "fp8" ? 0.005 : 0.0002;
        evidence.properties.push_back({fmt::format("loss_over_fp32 ({}, seed {})", precision, seed), narrow.loss / wide.loss - 1,
                                       Relation::at_most, limit,
                                       fmt::format("2 (2 e)^2 / 2 nats, e = 0.05 (fp8), 0.01 (16 bits), over 2 nats; fp32 ends "
                                                   "at {:.4f}, the source's entropy is {:.4f}",
                                                   wide.loss, wide.floor),
                                       -1, ""});
        if (precision == "bf16") {
          evidence.properties.push_back({fmt::format("skipped_steps (bf16, seed {})", seed), narrow.skipped, Relation::equal, 0.0,
                                         "there is no scale", -1, ""});
        } else if (precision == "fp16") {
          evidence.properties.push_back({fmt::format("skipped_steps (fp16, seed {})", seed), narrow.skipped, Relation::at_most,
                                         8.0, "2^16 may be too large at first; the interval is 2000 steps", -1, ""});
        }
      }
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_fp8_cases(CaseList& cases) {
  cases.push_back(fp8_product_case());
  cases.push_back(agreement_case());
  cases.push_back(evaluation_case());
  cases.push_back(convergence_case(1, 150, true));
  cases.push_back(convergence_case(3, 300, false));
}

}  // namespace tandem

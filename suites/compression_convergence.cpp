// SPDX-License-Identifier: Apache-2.0
// What error feedback is for: training with and without it, and the bias that the difference comes from.
#include <cmath>

#include <fmt/format.h>

#include "suites/compression_cases.h"
#include "suites/compression_groups.h"

namespace tandem {
namespace {

constexpr int kSeeds = 3;
constexpr std::int64_t kSteps = 200;
constexpr std::int64_t kBiasSteps = 40;

// Of what the exact run learns from its first loss, ln V, to its last: how much of it a codec may cost on average over the seeds,
// and how much it costs at least without feedback (none: what is left out is small and has no direction).
struct Cost {
  std::string codec;
  double with_feedback = 0.1;
  double without_feedback = 0;
  bool quick = true;
};

std::vector<Cost> costs() {
  return {{"int8", 0.05, 0, false},   {"int4", 0.05, 0, false},      {"sign", 0.1, 0.15, true},
          {"top_k", 0.1, 0.15, true}, {"random_k", 0.3, 0.4, false}, {"power_sgd", 0.15, 0.3, true}};
}

// Plain SGD: Adam's division by the size of a gradient hides much of what is missing from it.
ParallelVariant trained_variant() {
  return {.degrees = {.data = 2},
          .rows = 16,
          .layers = 1,
          .vocabulary = 32,
          .dropout = 0.0,
          .row_shape = RowShape::full,
          .initialization = Initialization::gpt2,
          .optimizer = OptimizerKind::sgd,
          .hidden = 36,
          .heads = 3,
          .mlp_hidden = 72};
}

CompressionConfig trained_with(const std::string& codec, bool error_feedback) {
  CompressionConfig config = compression_of(codec, error_feedback);
  config.block = 256;
  config.density = codec == "random_k" ? 0.1 : 0.02;
  return config;
}

CompressionScript script_of(const CompressionConfig& compression, int seed, std::int64_t steps, const RunContext& context) {
  RunContext own = context;
  own.seed = context.seed + static_cast<std::uint64_t>(seed);
  CompressionScript script;
  script.inputs = compressed_inputs(trained_variant(), compression, own);
  script.inputs.steps = steps;
  script.inputs.optimizer.learning_rate = 0.5;
  script.inputs.optimizer.max_grad_norm = 1.0;
  script.inputs.optimizer.weight_decay = 0;
  script.inputs.schedule = {ScheduleKind::cosine, 10, kSteps, 0.1};
  script.record_tensors = steps == kBiasSteps;
  return script;
}

double mean_loss(const CompressionConfig& compression, const RunContext& context) {
  double sum = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    sum += run_compressed(script_of(compression, seed, kSteps, context), context).validation_loss;
  }
  return sum / kSeeds;
}

// Length of all that the sums of kBiasSteps steps together left out, over the length of the sum of all gradients.
double bias(const CompressionConfig& compression, const RunContext& context) {
  const CompressionScript script = script_of(compression, 0, kBiasSteps, context);
  const CompressionRun run = run_compressed(script, context);
  double missing = 0, all = 0;
  for (const ReducingGroup& group : reducing_groups(script.inputs)) {
    std::vector<double> left_out(static_cast<std::size_t>(group.tensor.num_elements())), gradients = left_out;
    for (std::size_t i = 0; i < run.steps.front().size(); ++i) {
      const GroupStep at = group_step(run, group, i);
      for (std::size_t e = 0; e < gradients.size(); ++e) {
        double gradient = 0;
        for (const Floats& of_rank : at.gradient) gradient += of_rank[e];
        gradients[e] += gradient;
        left_out[e] += gradient - at.sum[e];
      }
    }
    for (const double value : left_out) missing += value * value;
    for (const double value : gradients) all += value * value;
  }
  return std::sqrt(missing / all);
}

Case convergence_case(const Cost& cost) {
  Case result = compression_case(fmt::format("{}/convergence/seeds3", cost.codec),
                                 fmt::format("{} steps of SGD, three seeds, with and without error feedback", kSteps),
                                 trained_variant(), trained_with(cost.codec, true), cost.quick);
  result.execute = [cost](const RunContext& context) {
    const double exact = mean_loss({}, context);
    const double with = mean_loss(trained_with(cost.codec, true), context);
    const double without = mean_loss(trained_with(cost.codec, false), context);
    const double learned = std::log(static_cast<double>(trained_variant().vocabulary)) - exact;
    const double bias_with = bias(trained_with(cost.codec, true), context);
    const double bias_without = bias(trained_with(cost.codec, false), context);
    const auto say = [&](double loss) {
      return fmt::format("mean validation loss {:.4f}, exact {:.4f}, of which {:.4f} was learned", loss, exact, learned);
    };
    CaseEvidence evidence;
    evidence.properties = {
        {"learned_by_exact_run", learned, Relation::at_least, 0.8, "the run that codecs are compared with trains", -1, ""},
        {"cost_with_feedback", (with - exact) / learned, Relation::at_most, cost.with_feedback, say(with), -1, ""},
        {"left_out_with_feedback", bias_with, Relation::at_most, bias_without,
         fmt::format("of the sum of the gradients of {} steps: what is in residuals, not more than what is lost for good "
                     "without them",
                     kBiasSteps),
         -1, ""}};
    if (cost.without_feedback == 0) {
      evidence.properties.push_back({"cost_without_feedback", (without - exact) / learned, Relation::at_most, cost.with_feedback,
                                     say(without) + ": what is left out is small and has no direction", -1, ""});
      return evidence;
    }
    evidence.properties.push_back({"cost_without_feedback", (without - exact) / learned, Relation::at_least,
                                   cost.without_feedback, say(without) + ": what is never sent is missed", -1, ""});
    evidence.properties.push_back({"left_out_without_over_with", bias_without / bias_with, Relation::at_least, 1.25,
                                   "residuals come back, what is dropped adds up", -1, ""});
    return evidence;
  };
  return result;
}

}  // namespace

void add_compression_convergence_cases(CaseList& cases) {
  for (const Cost& cost : costs()) cases.push_back(convergence_case(cost));
}

}  // namespace tandem

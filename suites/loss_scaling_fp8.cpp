// SPDX-License-Identifier: Apache-2.0
// Eight-bit operands of linear layers: what one product loses, and what a training run does.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include <fmt/format.h>

#include "core/synthetic_corpus.h"
#include "optimized/training/trainer.h"
#include "suites/loss_scaling_cases.h"
#include "suites/loss_scaling_run.h"

namespace tandem {
namespace {

// ---- one product

struct LinearLayer {
  const char* name;   // of weight and bias
  const char* input;  // as traced
  const char* output;
  Fp8Linear linear;
};
constexpr LinearLayer kLayers[] = {{"h.0.attn.c_attn", "h.0.ln_1", "h.0.attn.c_attn", Fp8Linear::c_attn},
                                   {"h.0.attn.c_proj", "h.0.attn", "h.0.attn.c_proj", Fp8Linear::attn_c_proj},
                                   {"h.0.mlp.c_fc", "h.0.ln_2", "h.0.mlp.c_fc", Fp8Linear::c_fc},
                                   {"h.0.mlp.c_proj", "h.0.mlp.gelu", "h.0.mlp.c_proj", Fp8Linear::mlp_c_proj}};

using Values = std::vector<double>;

// Of the last step: activations and their gradients, weights before it, scales that it used.
struct TracedStep {
  std::map<std::string, Values> tensors;
  std::map<std::string, Values> weights, weight_gradients;
  std::map<std::pair<int, int>, double> scales;  // by linear layer and operand
};

void keep_weights(const Engine& engine, TracedStep& traced) {
  for (std::size_t i = 0; i < engine.store().size(); ++i) {
    traced.weights[engine.store().spec(i).name] = ParameterStore::values_of(engine.store().parameter(i));
  }
  for (int linear = 0; linear < 4; ++linear) {
    for (int operand = 0; operand < 3; ++operand) {
      const Fp8Slot slot{0, static_cast<Fp8Linear>(linear), static_cast<Fp8Operand>(operand)};
      traced.scales[{linear, operand}] = engine.fp8_scaling()->scale(slot);
    }
  }
}

TracedStep traced_step(const RunContext& context) {
  constexpr std::int64_t kLast = 3;  // there are histories by then
  TracedStep traced;
  bool last = false;
  Script script;
  script.inputs = inputs_of({.dropout = 0.0, .precision = "fp8"}, context);
  script.inputs.steps = kLast + 1;
  script.before_step = [&](Engine& engine, std::int64_t step) {
    last = step == kLast;
    if (last) keep_weights(engine, traced);
  };
  script.trace = [&](const TracedTensor& tensor) {
    if (last) traced.tensors[tensor.name] = ParameterStore::values_of(tensor.values);
  };
  script.gradients = [&](const ParameterStore& store, std::int64_t) {
    for (std::size_t i = 0; last && i < store.size(); ++i) {
      traced.weight_gradients[store.spec(i).name] = ParameterStore::values_of(store.gradient(i));
    }
  };
  static_cast<void>(run_script(script, context, "traced"));
  return traced;
}

// Largest |fp8(x S) / S - x|: half a unit of a normal number (2^-4 of it with three mantissa bits, 2^-3 with two), half the
// smallest subnormal one, or what lies beyond the largest.
struct OperandError {
  double relative, smallest_half, largest;
  [[nodiscard]] double operator()(double x) const {
    return std::max(relative * std::fabs(x), smallest_half) + std::max(0.0, std::fabs(x) - largest);
  }
};
OperandError e4m3_error(double scale) { return {0x1p-4, 0x1p-10 / scale, 448 / scale}; }
OperandError e5m2_error(double scale) { return {0x1p-3, 0x1p-17 / scale, 57344 / scale}; }

// C [rows, columns] = A [rows, inner] B [inner, columns], all row-major; A or B is given transposed.
struct Product {
  const Values& a;
  const Values& b;
  std::int64_t rows, inner, columns;
  bool a_transposed, b_transposed;
  [[nodiscard]] double a_at(std::int64_t i, std::int64_t k) const {
    return a[static_cast<std::size_t>(a_transposed ? k * rows + i : i * inner + k)];
  }
  [[nodiscard]] double b_at(std::int64_t k, std::int64_t j) const {
    return b[static_cast<std::size_t>(b_transposed ? j * inner + k : k * columns + j)];
  }
};

struct ProductError {
  double largest_share_of_bound = 0;
  double error = 0, size = 0;  // sums of squares
};

// |sum over k of aq bq - a b| <= sum of |a| e(b) + |b| e(a) + e(a) e(b); the result is rounded once, at most to bf16.
ProductError compare(const Product& product, const Values& bias, const Values& result, const OperandError& ea,
                     const OperandError& eb) {
  ProductError worst;
  for (std::size_t i = 0; i < result.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / product.columns;
    const auto column = static_cast<std::int64_t>(i) % product.columns;
    double exact = 0;
    double bound = 0;
    for (std::int64_t k = 0; k < product.inner; ++k) {
      const double a = product.a_at(row, k);
      const double b = product.b_at(k, column);
      exact += a * b;
      bound += std::fabs(a) * eb(b) + std::fabs(b) * ea(a) + ea(a) * eb(b);
    }
    const double with_bias = exact + (bias.empty() ? 0 : bias[static_cast<std::size_t>(column)]);
    const double error = std::fabs(result[i] - with_bias);
    const double allowed = bound + 0x1p-8 * (std::fabs(with_bias) + bound);
    worst.largest_share_of_bound = std::max(worst.largest_share_of_bound, error / allowed);
    worst.error += error * error;
    worst.size += exact * exact;
  }
  return worst;
}

void add_product(const std::string& name, const ProductError& error, CaseEvidence& evidence) {
  const double relative = std::sqrt(error.error / error.size);
  evidence.properties.push_back(
      {fmt::format("largest_error_over_bound ({})", name), error.largest_share_of_bound, Relation::at_most, 1.0,
       "sum of |a| e(b) + |b| e(a) + e(a) e(b), e = 2^-4 for e4m3, 2^-3 for e5m2; 2^-8 for bf16", -1, ""});
  evidence.properties.push_back({fmt::format("relative_error ({})", name), relative, Relation::at_least, 0x1p-7,
                                 "operands of four significant bits cannot be as good as bf16, whose error is 2^-9", -1, ""});
}

Case product_case() {
  Case result = loss_scaling_case("fp8/products", "each product of quantised operands is as good as three mantissa bits allow",
                                  Criterion::convergence, {.dropout = 0.0, .precision = "fp8"});
  result.execute = [](const RunContext& context) {
    const TracedStep step = traced_step(context);
    CaseEvidence evidence;
    for (const LinearLayer& layer : kLayers) {
      const auto scale = [&](Fp8Operand operand) {
        return step.scales.at({static_cast<int>(layer.linear), static_cast<int>(operand)});
      };
      const Values& weight = step.weights.at(std::string(layer.name) + ".weight");
      const Values& bias = step.weights.at(std::string(layer.name) + ".bias");
      const auto out = static_cast<std::int64_t>(bias.size());
      const auto in = static_cast<std::int64_t>(weight.size()) / out;
      const Values& x = step.tensors.at(layer.input);
      const Values& dy = step.tensors.at("d." + std::string(layer.output));
      const auto tokens = static_cast<std::int64_t>(x.size()) / in;
      const OperandError of_x = e4m3_error(scale(Fp8Operand::x));
      const OperandError of_weight = e4m3_error(scale(Fp8Operand::w));
      const OperandError of_dy = e5m2_error(scale(Fp8Operand::dy));
      const std::string name = layer.name;
      add_product(name + " y",
                  compare({x, weight, tokens, in, out, false, false}, bias, step.tensors.at(layer.output), of_x, of_weight),
                  evidence);
      add_product(name + " dx",
                  compare({dy, weight, tokens, out, in, false, true}, {}, step.tensors.at("d." + std::string(layer.input)), of_dy,
                          of_weight),
                  evidence);
      add_product(name + " dW",
                  compare({x, dy, in, tokens, out, true, false}, {}, step.weight_gradients.at(name + ".weight"), of_x, of_dy),
                  evidence);
    }
    return evidence;
  };
  return result;
}

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
  cases.push_back(product_case());
  cases.push_back(agreement_case());
  cases.push_back(evaluation_case());
  cases.push_back(convergence_case(1, 150, true));
  cases.push_back(convergence_case(3, 300, false));
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// What one product loses to eight-bit operands, and that it loses nothing else.
#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "suites/loss_scaling_cases.h"
#include "suites/loss_scaling_run.h"

namespace tandem {
namespace {

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
  std::map<std::pair<int, int>, double> scales;          // by linear layer and operand
  std::map<std::pair<int, int>, double> largest_before;  // of each operand in the steps before
};

void observe(const Values& values, Fp8Linear linear, Fp8Operand operand, TracedStep& traced) {
  double& largest = traced.largest_before[{static_cast<int>(linear), static_cast<int>(operand)}];
  for (const double value : values) largest = std::max(largest, std::fabs(value));
}

void keep_weights(const Engine& engine, TracedStep& traced) {
  for (std::size_t i = 0; i < engine.store().size(); ++i) {
    traced.weights[engine.store().spec(i).name] = ParameterStore::values_of(engine.store().memory(), engine.store().parameter(i));
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
    if (last) {
      keep_weights(engine, traced);
      return;
    }
    for (const LinearLayer& layer : kLayers) {
      const std::size_t weight = engine.store().index_of(std::string(layer.name) + ".weight");
      observe(ParameterStore::values_of(engine.store().memory(), engine.store().parameter(weight)), layer.linear, Fp8Operand::w,
              traced);
    }
  };
  script.trace = [&](const TracedTensor& tensor) {
    const Values values = ParameterStore::values_of(tensor.values);
    if (last) traced.tensors[tensor.name] = values;
    for (const LinearLayer& layer : kLayers) {
      if (!last && tensor.name == layer.input) observe(values, layer.linear, Fp8Operand::x, traced);
      if (!last && tensor.name == "d." + std::string(layer.output)) observe(values, layer.linear, Fp8Operand::dy, traced);
    }
  };
  script.gradients = [&](const ParameterStore& store, std::int64_t) {
    for (std::size_t i = 0; last && i < store.size(); ++i) {
      traced.weight_gradients[store.spec(i).name] = ParameterStore::values_of(store.memory(), store.gradient(i));
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

// The operand as the product takes it: fp8(x S) / S.
Values quantised(const Values& values, Fp8Format format, double scale) {
  Values result;
  for (const double value : values) result.push_back(round_to_fp8(static_cast<float>(value * scale), format) / scale);
  return result;
}

// Of the same operands nothing is left but fp32 sums and one rounding of the result, to bf16 where it is stored so: an operand
// that was not quantised, or with another scale, is a whole fp8 rounding away.
double share_of_rounding(const Product& product, const Values& bias, const Values& result, DType stored) {
  double worst = 0;
  for (std::size_t i = 0; i < result.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / product.columns;
    const auto column = static_cast<std::int64_t>(i) % product.columns;
    double exact = bias.empty() ? 0 : bias[static_cast<std::size_t>(column)];
    double size = std::fabs(exact);
    for (std::int64_t k = 0; k < product.inner; ++k) {
      const double term = product.a_at(row, k) * product.b_at(k, column);
      exact += term;
      size += std::fabs(term);
    }
    const double sums = 0x1p-24 * static_cast<double>(product.inner + 1) * size;
    const double allowed = sums + unit_roundoff(stored) * (std::fabs(exact) + sums);
    if (allowed > 0) worst = std::max(worst, std::fabs(result[i] - exact) / allowed);
  }
  return worst;
}

void add_same_operands(const std::string& name, double share, CaseEvidence& evidence) {
  evidence.properties.push_back(
      {fmt::format("error_over_rounding_of_quantised ({})", name), share, Relation::at_most, 1.0,
       "K 2^-24 of the sum of |aq bq| and one rounding of the result, to bf16 but for dW: fp8(x S) / S are its operands", -1,
       ""});
}

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

// Scales of the last step that are not 2^floor(log2(largest number of the format / largest value of the steps before)).
Property scales_of_the_definition(const TracedStep& step) {
  double off = 0;
  std::string which;
  for (const auto& [slot, scale] : step.scales) {
    const bool gradient = slot.second == static_cast<int>(Fp8Operand::dy);
    const double largest = step.largest_before.at(slot);
    const double expected = std::exp2(std::floor(std::log2((gradient ? 57344 : 448) / largest)));
    if (scale == expected) continue;
    off += 1;
    which += fmt::format(" linear {} operand {}: {} instead of {};", slot.first, slot.second, scale, expected);
  }
  return {"scales_unlike_the_definition",
          off,
          Relation::equal,
          0.0,
          "every operand by its own largest value, in all steps of the history:" + which,
          -1,
          ""};
}

void add_product(const std::string& name, const ProductError& error, CaseEvidence& evidence) {
  const double relative = std::sqrt(error.error / error.size);
  evidence.properties.push_back(
      {fmt::format("largest_error_over_bound ({})", name), error.largest_share_of_bound, Relation::at_most, 1.0,
       "sum of |a| e(b) + |b| e(a) + e(a) e(b), e = 2^-4 for e4m3, 2^-3 for e5m2; 2^-8 for bf16", -1, ""});
  evidence.properties.push_back({fmt::format("relative_error ({})", name), relative, Relation::at_least, 0x1p-7,
                                 "operands of four significant bits cannot be as good as bf16, whose error is 2^-9", -1, ""});
}

}  // namespace

Case fp8_product_case() {
  Case result = loss_scaling_case("fp8/products", "each product of quantised operands is as good as three mantissa bits allow",
                                  Criterion::convergence, {.dropout = 0.0, .precision = "fp8"});
  result.execute = [](const RunContext& context) {
    const TracedStep step = traced_step(context);
    CaseEvidence evidence;
    evidence.properties.push_back(scales_of_the_definition(step));
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
      const Values xq = quantised(x, Fp8Format::e4m3, scale(Fp8Operand::x));
      const Values wq = quantised(weight, Fp8Format::e4m3, scale(Fp8Operand::w));
      const Values dyq = quantised(dy, Fp8Format::e5m2, scale(Fp8Operand::dy));
      add_same_operands(
          name + " y",
          share_of_rounding({xq, wq, tokens, in, out, false, false}, bias, step.tensors.at(layer.output), DType::bf16), evidence);
      add_same_operands(name + " dx",
                        share_of_rounding({dyq, wq, tokens, out, in, false, true}, {},
                                          step.tensors.at("d." + std::string(layer.input)), DType::bf16),
                        evidence);
      add_same_operands(
          name + " dW",
          share_of_rounding({xq, dyq, in, tokens, out, true, false}, {}, step.weight_gradients.at(name + ".weight"), DType::f32),
          evidence);
    }
    return evidence;
  };
  return result;
}

}  // namespace tandem

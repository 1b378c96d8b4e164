// SPDX-License-Identifier: Apache-2.0
#include "core/model_config.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/rng.h"

namespace tandem {
namespace {

constexpr double kInitStddev = 0.02;
constexpr double kScatteredNormStddev = 0.1;

void require_positive(std::int64_t value, std::string_view field) {
  if (value <= 0) throw InputError(fmt::format("model.{} is {}, it must be at least 1", field, value));
}

void require_probability(double value, std::string_view field) {
  if (!(value >= 0.0 && value < 1.0)) throw InputError(fmt::format("model.{} is {}, it must lie in [0, 1)", field, value));
}

}  // namespace

void validate(const GptConfig& model) {
  require_positive(model.vocabulary, "vocabulary");
  require_positive(model.sequence, "sequence");
  require_positive(model.layers, "layers");
  require_positive(model.hidden, "hidden");
  require_positive(model.heads, "heads");
  if (model.mlp_hidden < 0)
    throw InputError(fmt::format("model.mlp_hidden is {}, it must be 0 (4 x hidden) or more", model.mlp_hidden));
  if (model.hidden % model.heads != 0) {
    throw InputError(fmt::format("model.heads is {}, which does not divide model.hidden {}; choose heads that divide it",
                                 model.heads, model.hidden));
  }
  if (!(model.layer_norm_epsilon > 0)) throw InputError("model.layer_norm_epsilon must be positive");
  if (model.experts < 0) throw InputError(fmt::format("model.experts is {}, it must be 0 (dense) or more", model.experts));
  if (model.experts > 0 && (model.expert_choices < 1 || model.expert_choices > std::min(2, model.experts))) {
    throw InputError(fmt::format("model.expert_choices is {}, it must be 1 or 2 and at most model.experts {}",
                                 model.expert_choices, model.experts));
  }
  if (!(model.capacity_factor > 0)) throw InputError("model.capacity_factor must be positive");
  if (!(model.auxiliary_loss_weight >= 0)) throw InputError("model.auxiliary_loss_weight must not be negative");
  require_probability(model.embedding_dropout, "embedding_dropout");
  require_probability(model.attention_dropout, "attention_dropout");
  require_probability(model.residual_dropout, "residual_dropout");
}

std::int64_t GptConfig::expert_capacity(std::int64_t row_tokens) const {
  if (experts == 0) return 0;
  const double share = capacity_factor * expert_choices * static_cast<double>(row_tokens) / experts;
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::ceil(share)), 1, std::max<std::int64_t>(1, row_tokens));
}

std::vector<ParameterSpec> gpt_parameters(const GptConfig& model) {
  const std::int64_t hidden = model.hidden;
  const std::int64_t width = model.mlp_width();
  std::vector<ParameterSpec> list;
  const auto add = [&](std::string name, Shape shape, ParameterKind kind, int layer = -1, bool residual = false,
                       int expert = -1) {
    list.push_back({std::move(name), std::move(shape), kind, layer, residual, expert});
  };
  const auto add_mlp = [&](const std::string& prefix, int layer, int expert) {
    add(prefix + "c_fc.weight", {hidden, width}, ParameterKind::matrix, layer, false, expert);
    add(prefix + "c_fc.bias", {width}, ParameterKind::bias, layer, false, expert);
    add(prefix + "c_proj.weight", {width, hidden}, ParameterKind::matrix, layer, true, expert);
    add(prefix + "c_proj.bias", {hidden}, ParameterKind::bias, layer, false, expert);
  };
  add("wte.weight", {model.vocabulary, hidden}, ParameterKind::token_embedding);
  add("wpe.weight", {model.sequence, hidden}, ParameterKind::position_embedding);
  for (int layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = fmt::format("h.{}.", layer);
    add(prefix + "ln_1.weight", {hidden}, ParameterKind::norm_weight, layer);
    add(prefix + "ln_1.bias", {hidden}, ParameterKind::norm_bias, layer);
    add(prefix + "attn.c_attn.weight", {hidden, 3 * hidden}, ParameterKind::matrix, layer);
    add(prefix + "attn.c_attn.bias", {3 * hidden}, ParameterKind::bias, layer);
    add(prefix + "attn.c_proj.weight", {hidden, hidden}, ParameterKind::matrix, layer, true);
    add(prefix + "attn.c_proj.bias", {hidden}, ParameterKind::bias, layer);
    add(prefix + "ln_2.weight", {hidden}, ParameterKind::norm_weight, layer);
    add(prefix + "ln_2.bias", {hidden}, ParameterKind::norm_bias, layer);
    if (model.experts == 0) add_mlp(prefix + "mlp.", layer, -1);
    if (model.experts > 0) add(prefix + "mlp.router.weight", {hidden, model.experts}, ParameterKind::router, layer);
    for (int e = 0; e < model.experts; ++e) add_mlp(fmt::format("{}mlp.experts.{}.", prefix, e), layer, e);
  }
  add("ln_f.weight", {hidden}, ParameterKind::norm_weight);
  add("ln_f.bias", {hidden}, ParameterKind::norm_bias);
  if (!model.tied) add("lm_head.weight", {model.vocabulary, hidden}, ParameterKind::matrix);
  return list;
}

std::int64_t num_parameters(const GptConfig& model) {
  std::int64_t count = 0;
  for (const ParameterSpec& parameter : gpt_parameters(model)) count += parameter.num_elements();
  return count;
}

double initial_value(const GptConfig& model, const ParameterSpec& parameter, Initialization how, std::uint64_t seed,
                     std::int64_t element_index) {
  const auto normal = [&] { return parameter_normal(seed, parameter.name, static_cast<std::uint64_t>(element_index)); };
  const bool scattered = how == Initialization::scattered;
  double value = 0.0;
  switch (parameter.kind) {
    case ParameterKind::norm_weight: value = scattered ? 1.0 + kScatteredNormStddev * normal() : 1.0; break;
    case ParameterKind::bias:
    case ParameterKind::norm_bias: value = scattered ? kInitStddev * normal() : 0.0; break;
    // Router logits are of order 1 from the start: choices differ between tokens, and few lie within rounding of a tie.
    case ParameterKind::router: value = normal() / std::sqrt(static_cast<double>(model.hidden)); break;
    default: value = kInitStddev * normal() * (parameter.residual_projection ? 1.0 / std::sqrt(2.0 * model.layers) : 1.0);
  }
  return static_cast<double>(static_cast<float>(value));
}

}  // namespace tandem

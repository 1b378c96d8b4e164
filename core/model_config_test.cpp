// SPDX-License-Identifier: Apache-2.0
#include "core/model_config.h"

#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/rng.h"

namespace tandem {
namespace {

GptConfig gpt2_small() { return {.vocabulary = 50257, .sequence = 1024, .layers = 12, .hidden = 768, .heads = 12}; }

ParameterSpec find(const GptConfig& model, const std::string& name) {
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    if (parameter.name == name) return parameter;
  }
  throw ContractError("no parameter " + name);
}

TEST(GptParameters, CountOfGpt2SmallIsThePublishedOne) {
  GptConfig model = gpt2_small();
  EXPECT_EQ(num_parameters(model), 124'439'808);
  model.tied = false;
  EXPECT_EQ(num_parameters(model), 124'439'808 + 50257LL * 768);
}

TEST(GptParameters, StandInDefinitionOrderWithHuggingFaceNames) {
  const GptConfig model{.vocabulary = 11, .sequence = 5, .layers = 1, .hidden = 6, .heads = 2, .mlp_hidden = 7, .tied = false};
  const std::vector<std::pair<std::string, Shape>> expected = {
      {"wte.weight", {11, 6}},
      {"wpe.weight", {5, 6}},
      {"h.0.ln_1.weight", {6}},
      {"h.0.ln_1.bias", {6}},
      {"h.0.attn.c_attn.weight", {6, 18}},
      {"h.0.attn.c_attn.bias", {18}},
      {"h.0.attn.c_proj.weight", {6, 6}},
      {"h.0.attn.c_proj.bias", {6}},
      {"h.0.ln_2.weight", {6}},
      {"h.0.ln_2.bias", {6}},
      {"h.0.mlp.c_fc.weight", {6, 7}},
      {"h.0.mlp.c_fc.bias", {7}},
      {"h.0.mlp.c_proj.weight", {7, 6}},
      {"h.0.mlp.c_proj.bias", {6}},
      {"ln_f.weight", {6}},
      {"ln_f.bias", {6}},
      {"lm_head.weight", {11, 6}},
  };

  std::vector<std::pair<std::string, Shape>> found;
  for (const ParameterSpec& parameter : gpt_parameters(model)) found.emplace_back(parameter.name, parameter.shape);

  EXPECT_EQ(found, expected);
}

TEST(GptParameters, OnlyMatricesAndEmbeddingsDecay) {
  for (const ParameterSpec& parameter : gpt_parameters(gpt2_small())) {
    const bool is_vector = parameter.name.ends_with(".bias") || parameter.name.find("ln_") != std::string::npos;
    EXPECT_EQ(parameter.decays(), !is_vector) << parameter.name;
    EXPECT_EQ(parameter.residual_projection, parameter.name.ends_with("c_proj.weight")) << parameter.name;
  }
}

TEST(GptParameters, LayersAreNumbered) {
  const GptConfig model{.layers = 3};
  EXPECT_EQ(find(model, "h.2.mlp.c_fc.bias").layer, 2);
  EXPECT_EQ(find(model, "ln_f.weight").layer, -1);
  EXPECT_EQ(gpt_parameters(model).size(), 2U + 3 * 12 + 2);
}

TEST(GptConfig, DerivedSizes) {
  GptConfig model = gpt2_small();
  EXPECT_EQ(model.mlp_width(), 3072);
  EXPECT_EQ(model.head_size(), 64);
  EXPECT_FALSE(model.has_dropout());
  model.mlp_hidden = 10;
  model.attention_dropout = 0.1;
  EXPECT_EQ(model.mlp_width(), 10);
  EXPECT_TRUE(model.has_dropout());
}

TEST(Validate, NamesTheFieldAtFault) {
  struct Broken {
    std::string field;
    std::function<void(GptConfig&)> damage;
  };
  const std::vector<Broken> cases = {
      {"model.vocabulary", [](GptConfig& m) { m.vocabulary = 0; }},
      {"model.sequence", [](GptConfig& m) { m.sequence = -1; }},
      {"model.layers", [](GptConfig& m) { m.layers = 0; }},
      {"model.hidden", [](GptConfig& m) { m.hidden = 0; }},
      {"model.heads", [](GptConfig& m) { m.heads = 0; }},
      {"model.heads is 5", [](GptConfig& m) { m.heads = 5; }},
      {"model.mlp_hidden", [](GptConfig& m) { m.mlp_hidden = -4; }},
      {"model.layer_norm_epsilon", [](GptConfig& m) { m.layer_norm_epsilon = std::nan(""); }},
      {"model.embedding_dropout", [](GptConfig& m) { m.embedding_dropout = 1.0; }},
      {"model.attention_dropout", [](GptConfig& m) { m.attention_dropout = -0.1; }},
      {"model.residual_dropout", [](GptConfig& m) { m.residual_dropout = std::nan(""); }},
  };
  EXPECT_NO_THROW(validate(GptConfig{}));
  for (const Broken& broken : cases) {
    GptConfig model;
    broken.damage(model);
    try {
      validate(model);
      ADD_FAILURE() << broken.field << " was accepted";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(broken.field), std::string::npos) << error.what();
    }
  }
}

// Root mean square of the first values of a parameter, around `centre`.
double spread(const GptConfig& model, const std::string& name, Initialization how, double centre) {
  const ParameterSpec parameter = find(model, name);
  const std::int64_t count = parameter.num_elements();
  double squares = 0;
  for (std::int64_t i = 0; i < count; ++i) squares += std::pow(initial_value(model, parameter, how, 3, i) - centre, 2);
  return std::sqrt(squares / static_cast<double>(count));
}

TEST(InitialValue, FollowsGpt2) {
  const GptConfig model{.vocabulary = 97, .layers = 8, .hidden = 96, .heads = 4};
  const auto gpt2 = Initialization::gpt2;
  EXPECT_NEAR(spread(model, "wte.weight", gpt2, 0), 0.02, 0.001);
  EXPECT_NEAR(spread(model, "h.3.mlp.c_fc.weight", gpt2, 0), 0.02, 0.001);
  EXPECT_NEAR(spread(model, "h.3.mlp.c_proj.weight", gpt2, 0), 0.02 / 4, 0.00025);
  EXPECT_EQ(spread(model, "h.3.mlp.c_proj.bias", gpt2, 0), 0.0);
  EXPECT_EQ(spread(model, "ln_f.weight", gpt2, 1), 0.0);
  EXPECT_EQ(spread(model, "ln_f.bias", gpt2, 0), 0.0);
}

TEST(InitialValue, ScatteredLeavesNoZeroBiasAndNoUnitWeight) {
  const GptConfig model{.vocabulary = 97, .layers = 2, .hidden = 256, .heads = 4};
  const auto scattered = Initialization::scattered;
  EXPECT_NEAR(spread(model, "h.1.attn.c_attn.bias", scattered, 0), 0.02, 0.003);
  EXPECT_NEAR(spread(model, "h.1.ln_2.weight", scattered, 1), 0.1, 0.025);
  EXPECT_NEAR(spread(model, "ln_f.bias", scattered, 0), 0.02, 0.005);
  EXPECT_EQ(spread(model, "wpe.weight", scattered, 0), spread(model, "wpe.weight", Initialization::gpt2, 0));
}

TEST(InitialValue, IsExactInFloatAndDiffersByParameter) {
  const GptConfig model;
  std::set<double> values;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const double value = initial_value(model, parameter, Initialization::scattered, 1, 0);
    EXPECT_EQ(static_cast<double>(static_cast<float>(value)), value);
    values.insert(value);
  }
  EXPECT_EQ(values.size(), gpt_parameters(model).size());
}

}  // namespace
}  // namespace tandem

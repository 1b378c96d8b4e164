// SPDX-License-Identifier: Apache-2.0
#include "core/model_shape.h"

#include <map>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

TEST(ModelShape, CountsParametersAsTheModelThatIsTrained) {
  GptConfig odd;
  odd.vocabulary = 301, odd.sequence = 37, odd.layers = 3, odd.hidden = 30, odd.heads = 5;
  GptConfig narrow = odd;
  narrow.mlp_hidden = 77, narrow.tied = false;
  GptConfig experts = odd;
  experts.experts = 4, experts.expert_choices = 2;
  for (const GptConfig& model : {odd, narrow, experts}) {
    EXPECT_EQ(num_parameters(shape_of(model)), static_cast<double>(num_parameters(model)));
    EXPECT_EQ(gpt_config_of(shape_of(model)), model);
  }
}

TEST(ModelShape, ShippedModelsHaveThePublishedSizes) {
  // Parameters in billions as the publications print them; half a unit of the last digit printed is rounding.
  const std::map<std::string, std::pair<double, double>> published = {
      {"gpt2-124m", {0.124439808, 1e-12}}, {"gpt2-1558m", {1.5576112, 1e-12}},
      {"gpt-1.7b", {1.7, 0.05}},           {"gpt-3.6b", {3.6, 0.05}},
      {"gpt-7.5b", {7.5, 0.05}},           {"gpt-18.4b", {18.4, 0.05}},
      {"gpt-39.1b", {39.1, 0.05}},         {"gpt-76.1b", {76.1, 0.05}},
      {"gpt-145.6b", {145.6, 0.05}},       {"gpt-310b", {310.1, 0.05}},
      {"gpt-530b", {529.6, 0.05}},         {"gpt-1t", {1008.0, 0.05}},
      {"gpt3-175b", {174.6, 0.05}},        {"bloom-176b", {176.247, 0.001}},
      {"gpt-neox-20b", {20.55, 0.01}},     {"mpt-7b", {6.65, 0.01}},
      {"llama2-7b", {6.738415616, 1e-9}},  {"llama2-70b", {68.976648192, 1e-9}},
      {"llama3-8b", {8.030261248, 1e-9}},  {"llama3-70b", {70.553706496, 1e-9}},
      {"llama3-405b", {405.853, 0.001}}};
  for (const auto& [name, size] : published) {
    EXPECT_NEAR(num_parameters(read_model_shape(name)) / 1e9, size.first, size.second) << name;
  }
}

TEST(ModelShape, EveryShippedModelCanBeRead) {
  const std::vector<std::string> names = shipped_models();
  EXPECT_GE(names.size(), 28U);
  for (const std::string& name : names) {
    const ModelShape model = read_model_shape(name);
    EXPECT_EQ(model.name, name);
    EXPECT_GT(num_parameters(model), 1e8) << name;
  }
}

TEST(ModelShape, FlopsOfAGptFollowThePublishedFormula) {
  const ModelShape model = read_model_shape("gpt3-175b");
  const double s = 2048, h = 12288, layers = 96, vocabulary = 51200;
  const double published = 72 * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (12 * layers * h));
  EXPECT_NEAR(3 * forward_flops_per_row(model, 2048, AttentionFlops::full) / published, 1, 1e-12);
  const double masked = 3 * s * layers * 2 * s * h;
  EXPECT_NEAR(3 * forward_flops_per_row(model, 2048, AttentionFlops::causal), published - masked, 1e-9 * published);
}

TEST(ModelShape, FlopsOfGroupedQueriesAndGatesCountTheirMatrices) {
  const ModelShape model = read_model_shape("llama3-405b");
  // The benchmark's own constant for a sample of 8,192 tokens, forward and backward: 21,508 TFLOP.
  EXPECT_NEAR(3 * forward_flops_per_row(model, 8192, AttentionFlops::full) / 1e12, 21508, 0.002 * 21508);
}

TEST(ModelShape, OnlyAGptIsTrained) {
  EXPECT_TRUE(gpt_config_of(read_model_shape("gpt-1t")).has_value());
  EXPECT_FALSE(gpt_config_of(read_model_shape("llama3-8b")).has_value());
  EXPECT_FALSE(gpt_config_of(read_model_shape("bloom-176b")).has_value());
}

TEST(ModelShape, TheTwinIsSmallAndDivisible) {
  for (const std::string name : {"gpt3-175b", "llama3-405b", "gpt-1t"}) {
    for (const auto& [tensor, stages] : {std::pair{1, 1}, {2, 6}, {8, 4}, {3, 5}}) {
      const GptConfig twin = small_twin(read_model_shape(name), tensor, stages);
      ASSERT_NO_THROW(validate(twin));
      EXPECT_EQ(twin.heads % tensor, 0);
      EXPECT_EQ(twin.mlp_width() % tensor, 0);
      EXPECT_EQ(twin.layers % stages, 0);
      EXPECT_LT(num_parameters(twin), 20'000'000);
    }
  }
}

std::string refusal(const std::string& text) {
  try {
    static_cast<void>(model_shape_from_json(text, "m.json"));
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(ModelShape, RefusesWhatIsWrongByName) {
  EXPECT_NE(refusal(R"({"shape": {"layers": 2, "hidden": 64, "headz": 4}})").find("did you mean heads"), std::string::npos);
  EXPECT_NE(refusal(R"({"shape": {"layers": 2, "hidden": 64}})").find("heads' is missing"), std::string::npos);
  EXPECT_NE(refusal(R"({"shape": {"layers": 0, "hidden": 64, "heads": 4}})").find("shape.layers"), std::string::npos);
  EXPECT_NE(refusal(R"({"shape": {"layers": 2, "hidden": 66, "heads": 4}})").find("does not divide"), std::string::npos);
  EXPECT_NE(refusal(R"({"shape": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 3}})").find("kv_heads"), std::string::npos);
  EXPECT_NE(refusal(R"({"shape": {"layers": 3000000000, "hidden": 64, "heads": 4}})").find("at most"), std::string::npos);
  EXPECT_NE(
      refusal(R"({"shape": {"layers": 2, "hidden": 64, "heads": 4, "experts": 2, "expert_choices": 9}})").find("expert_choices"),
      std::string::npos);
  EXPECT_NE(refusal(R"({"shape": {"layers": 2, "hidden": 64, "heads": 4, "gated": 1}})").find("gated"), std::string::npos);
  EXPECT_NE(refusal(R"({"layers": 2})").find("neither"), std::string::npos);
  EXPECT_THROW(static_cast<void>(read_model_shape("gpt3-176b")), InputError);
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// Every backward pass against finite differences of its forward pass: each operator alone, then every element of every parameter
// of a whole model. Double throughout.
#include <gtest/gtest.h>

#include <algorithm>

#include "reference/attention.h"
#include "reference/gpt.h"
#include "reference/ops.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

using Values = std::vector<double>;

double dot(const Values& a, const Values& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST(GradientCheck, Embedding) {
  Values wte = random_values(5 * 3, 1), wpe = random_values(4 * 3, 2);
  const std::vector<std::int32_t> ids = {4, 1, 1, 0}, positions = {0, 3, 3, 1};
  const Values dout = random_values(4 * 3, 3);
  Values dwte(wte.size()), dwpe(wpe.size());

  embedding_backward<double>(dout, ids, positions, dwte, dwpe);

  const auto f = [&] {
    Values out(dout.size());
    embedding_forward<double>(wte, wpe, ids, positions, out);
    return dot(out, dout);
  };
  expect_gradient("wte", wte, dwte, f);
  expect_gradient("wpe", wpe, dwpe, f);
}

TEST(GradientCheck, LayerNorm) {
  Values x = random_values(3 * 7, 1), weight = random_values(7, 2, 0.3, 1.0), bias = random_values(7, 3);
  const Values dy = random_values(x.size(), 4);
  Values y(x.size()), mean(3), rstd(3), dx(x.size()), dweight(7), dbias(7);

  layer_norm_forward<double>(x, weight, bias, 1e-5, y, {mean, rstd});
  layer_norm_backward<double>(x, weight, {mean, rstd}, dy, dx, dweight, dbias);

  const auto f = [&] {
    layer_norm_forward<double>(x, weight, bias, 1e-5, y, {mean, rstd});
    return dot(y, dy);
  };
  expect_gradient("x", x, dx, f);
  expect_gradient("weight", weight, dweight, f);
  expect_gradient("bias", bias, dbias, f);
}

TEST(GradientCheck, LinearAndHead) {
  const LinearSize size{4, 3, 5};
  Values x = random_values(12, 1), weight = random_values(15, 2), bias = random_values(5, 3), table = random_values(15, 4);
  const Values dy = random_values(20, 5);
  Values y(20), dx(12), dweight(15), dbias(5), dx_head(12), dtable(15);

  linear_backward<double>(size, x, weight, dy, dx, dweight, dbias);
  head_backward<double>(size, x, table, dy, dx_head, dtable);

  const auto linear = [&] {
    linear_forward<double>(size, x, weight, bias, y);
    return dot(y, dy);
  };
  const auto head = [&] {
    head_forward<double>(size, x, table, y);
    return dot(y, dy);
  };
  expect_gradient("linear x", x, dx, linear);
  expect_gradient("linear weight", weight, dweight, linear);
  expect_gradient("linear bias", bias, dbias, linear);
  expect_gradient("head x", x, dx_head, head);
  expect_gradient("head table", table, dtable, head);
}

TEST(GradientCheck, Gelu) {
  Values x = random_values(40, 1, 2.0);
  const Values dy = random_values(x.size(), 2);
  Values y(x.size()), dx(x.size());

  gelu_backward<double>(x, dy, dx);

  expect_gradient("x", x, dx, [&] {
    gelu_forward<double>(x, y);
    return dot(y, dy);
  });
}

TEST(GradientCheck, DropoutAndResidual) {
  const Dropout dropout{0.4, {3, 1, 1, DropoutSite::attention_residual}};
  const std::vector<std::int64_t> row_ids = {6, 2};
  const RowPlacement rows{row_ids, 2, 3};
  Values x = random_values(2 * 2 * 5, 1), residual = random_values(x.size(), 2);
  const Values dy = random_values(x.size(), 3);
  Values y(x.size()), dx(x.size());

  apply_dropout<double>(dropout, rows, dy, dx);

  const auto f = [&] {
    apply_dropout<double>(dropout, rows, x, y);
    add<double>(residual, y, y);
    return dot(y, dy);
  };
  expect_gradient("x", x, dx, f);
  expect_gradient("residual", residual, dy, f);
}

TEST(GradientCheck, AttentionWithDropoutOverPackedDocuments) {
  const std::vector<std::int64_t> row_ids = {5, 1};
  const std::vector<std::int32_t> starts = {0, 0, 0, 3, 3, 0, 1, 1, 1, 4};
  const AttentionInput input{2, 6, {row_ids, 5, 8}, starts, {0.3, {11, 4, 1, DropoutSite::attention_probability}}};
  Values qkv = random_values(2 * 5 * 18, 1);
  const Values dout = random_values(2 * 5 * 6, 2);
  Values out(dout.size()), probabilities(2 * 2 * 25), dqkv(qkv.size());

  attention_forward<double>(input, qkv, out, probabilities);
  attention_backward<double>(input, qkv, probabilities, dout, dqkv);

  expect_gradient("qkv", qkv, dqkv, [&] {
    attention_forward<double>(input, qkv, out, probabilities);
    return dot(out, dout);
  });
}

TEST(GradientCheck, CrossEntropyWithIgnoredTargets) {
  Values logits = random_values(4 * 6, 1);
  const std::vector<std::int32_t> targets = {2, kIgnoredTarget, 5, 0};
  Values log_sum_exp(4), dlogits(logits.size());

  static_cast<void>(cross_entropy_forward<double>(logits, targets, 5, log_sum_exp));
  cross_entropy_backward<double>(logits, targets, 5, log_sum_exp, dlogits);

  expect_gradient("logits", logits, dlogits, [&] { return cross_entropy_forward<double>(logits, targets, 5, log_sum_exp); });
}

struct ModelCase {
  std::string name;
  bool tied;
  double dropout;
  bool packed;
};

class ModelGradientCheck : public testing::TestWithParam<ModelCase> {};

TEST_P(ModelGradientCheck, EveryElementOfEveryParameter) {
  GptConfig model{.vocabulary = 7, .sequence = 6, .layers = 2, .hidden = 6, .heads = 2, .mlp_hidden = 10};
  model.tied = GetParam().tied;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = GetParam().dropout;
  Batch batch = ragged_batch(model, 5, {5, 2, 4}, 3);
  if (GetParam().packed) pack_documents(batch, {2, 3});
  batch.row_ids = {8, 0, 3};
  NamedTensors<double> parameters = lively_parameters(model, 4);
  const Pass<double> pass{.valid_tokens = batch.valid_tokens() + 2, .dropout = DropoutStep{21, 5}};
  NamedTensors<double> gradients = zero_tensors<double>(model);

  const double value = loss_and_gradients(model, parameters, batch, pass, gradients);

  EXPECT_EQ(value, loss(model, parameters, batch, pass));
  for (auto& [name, values] : parameters) {
    expect_gradient(name, values, gradients.at(name), [&] { return loss(model, parameters, batch, pass); });
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ModelGradientCheck,
                         testing::Values(ModelCase{"tied", true, 0.0, false}, ModelCase{"untied", false, 0.0, false},
                                         ModelCase{"tied_dropout", true, 0.2, false},
                                         ModelCase{"untied_dropout_packed", false, 0.2, true},
                                         ModelCase{"tied_packed", true, 0.0, true}),
                         [](const auto& instance) { return instance.param.name; });

TEST(GradientCheck, KeyBiasHasNoGradient) {
  const GptConfig model{.vocabulary = 7, .sequence = 6, .layers = 1, .hidden = 6, .heads = 2, .mlp_hidden = 0};
  const Batch batch = ragged_batch(model, 6, {6, 3}, 3);
  NamedTensors<double> gradients = zero_tensors<double>(model);

  loss_and_gradients<double>(model, lively_parameters(model, 4), batch, {.valid_tokens = batch.valid_tokens()}, gradients);

  const Values& bias = gradients.at("h.0.attn.c_attn.bias");
  for (std::size_t i = 0; i < bias.size(); ++i) {
    const bool key = i >= 6 && i < 12;
    EXPECT_EQ(std::abs(bias[i]) < 1e-15, key) << "element " << i << " is " << bias[i];
  }
}

}  // namespace
}  // namespace tandem::reference

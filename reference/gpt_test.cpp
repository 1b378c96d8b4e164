// SPDX-License-Identifier: Apache-2.0
#include "reference/gpt.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "core/error.h"
#include "reference/attention.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

GptConfig small_model() { return {.vocabulary = 11, .sequence = 8, .layers = 2, .hidden = 12, .heads = 3, .mlp_hidden = 20}; }

TEST(Gpt, ExecutesTheMultiplyAddsThatTheFlopFormulaCounts) {
  const GptConfig model = small_model();
  const Batch batch = ragged_batch(model, model.sequence, {8, 3, 0}, 1);
  MultiplyAdds count;
  NamedTensors<double> gradients = zero_tensors<double>(model);

  loss_and_gradients<double>(model, lively_parameters(model, 1), batch,
                             {.valid_tokens = batch.valid_tokens(), .multiply_adds = &count}, gradients);

  const std::int64_t t = model.sequence, c = model.hidden, f = model.mlp_width();
  // Forward per row: c_attn, attention's c_proj, two MLP products, the head; then q k^T and p v over the causal triangle.
  const std::int64_t linear = t * (model.layers * (c * 3 * c + c * c + 2 * c * f) + c * model.vocabulary);
  const std::int64_t attention = model.layers * 2 * c * t * (t + 1) / 2;
  EXPECT_EQ(count.linear, 3 * batch.rows * linear);
  EXPECT_EQ(count.attention, 3 * batch.rows * attention);
}

TEST(Gpt, CountsOnlyPairsInsideADocument) {
  const GptConfig model = small_model();
  Batch batch = ragged_batch(model, 8, {8}, 1);
  pack_documents(batch, {3});
  MultiplyAdds count;

  const double value = loss<double>(model, lively_parameters(model, 1), batch, {.valid_tokens = 8, .multiply_adds = &count});

  EXPECT_GT(value, 0.0);
  EXPECT_EQ(count.attention, model.layers * 2 * model.hidden * (3 * 4 / 2 + 5 * 6 / 2));
}

TEST(Gpt, GradientsAddUpOverMicroBatches) {
  const GptConfig model = small_model();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = ragged_batch(model, 8, {8, 2, 5}, 2);
  const Pass<double> pass{.valid_tokens = batch.valid_tokens(), .dropout = DropoutStep{3, 1}};
  NamedTensors<double> at_once = zero_tensors<double>(model), in_parts = at_once;

  const double loss_at_once = loss_and_gradients(model, parameters, batch, pass, at_once);
  double loss_in_parts = 0.0;
  for (std::int64_t row = 0; row < 3; ++row) {
    loss_in_parts += loss_and_gradients(model, parameters, slice_rows(batch, row, 1), pass, in_parts);
  }

  EXPECT_NEAR(loss_in_parts, loss_at_once, 1e-14 * loss_at_once);
  EXPECT_LE(relative_l2(in_parts.at("wte.weight"), at_once.at("wte.weight")), 1e-14);
}

TEST(Gpt, PackedDocumentsAreComputedAsIfAlone) {
  const GptConfig model = small_model();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  Batch packed = ragged_batch(model, 8, {8}, 2);
  pack_documents(packed, {3});
  Batch alone = make_batch(1, 5);
  std::copy(packed.ids.begin() + 3, packed.ids.end(), alone.ids.begin());

  const std::vector<double> of_packed = logits(model, parameters, packed);
  const std::vector<double> of_alone = logits(model, parameters, alone);

  EXPECT_LE(relative_l2(std::vector<double>(of_packed.begin() + 3 * model.vocabulary, of_packed.end()), of_alone), 1e-15);
}

TEST(Gpt, LaterTokensDoNotChangeEarlierLogits) {
  const GptConfig model = small_model();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  Batch batch = ragged_batch(model, 8, {8}, 2);
  const std::vector<double> before = logits(model, parameters, batch);

  batch.ids[5] = (batch.ids[5] + 1) % 11;
  const std::vector<double> after = logits(model, parameters, batch);

  const auto changed = std::mismatch(before.begin(), before.end(), after.begin()).first - before.begin();
  EXPECT_EQ(changed / model.vocabulary, 5);
}

TEST(Gpt, DropoutIsOffWithoutAStepAndDiffersBetweenSteps) {
  GptConfig model = small_model();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = ragged_batch(model, 8, {8, 8}, 2);
  const double plain = loss<double>(model, parameters, batch, {.valid_tokens = 16});
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1;

  const double off = loss<double>(model, parameters, batch, {.valid_tokens = 16});
  const double first = loss<double>(model, parameters, batch, {.valid_tokens = 16, .dropout = DropoutStep{1, 0}});
  const double second = loss<double>(model, parameters, batch, {.valid_tokens = 16, .dropout = DropoutStep{1, 1}});

  EXPECT_EQ(off, plain);
  EXPECT_NE(first, plain);
  EXPECT_NE(first, second);
}

/// The four sites are separate masks: switching each on alone must change the loss, each differently.
TEST(Gpt, EachDropoutSiteActs) {
  const NamedTensors<double> parameters = lively_parameters(small_model(), 1);
  const Batch batch = ragged_batch(small_model(), 8, {8, 8}, 2);
  const auto loss_with = [&](double embedding, double attention, double residual) {
    GptConfig model = small_model();
    model.embedding_dropout = embedding;
    model.attention_dropout = attention;
    model.residual_dropout = residual;
    return loss<double>(model, parameters, batch, {.valid_tokens = 16, .dropout = DropoutStep{1, 0}});
  };
  const std::vector<double> losses = {loss_with(0, 0, 0), loss_with(0.2, 0, 0), loss_with(0, 0.2, 0), loss_with(0, 0, 0.2)};
  for (std::size_t i = 0; i < losses.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_GT(std::abs(losses[i] - losses[j]), 1e-6) << i << " and " << j;
  }
}

TEST(Gpt, TracesInTheOrderOfExecution) {
  const GptConfig model = small_model();
  const Batch batch = ragged_batch(model, 8, {8}, 2);
  NamedTensors<double> gradients = zero_tensors<double>(model);
  std::vector<std::string> names;
  std::vector<double> traced_logits;
  const Tracer<double> trace = [&](std::string_view name, std::span<const double> values) {
    names.emplace_back(name);
    if (name == "logits") traced_logits.assign(values.begin(), values.end());
  };

  loss_and_gradients<double>(model, lively_parameters(model, 1), batch, {.valid_tokens = 8, .trace = trace}, gradients);

  EXPECT_EQ(names.front(), "embedding");
  EXPECT_EQ(names.back(), "d.embedding");
  EXPECT_EQ(traced_logits, logits(model, lively_parameters(model, 1), batch));
  // Every activation that has a gradient is followed by it, in reverse.
  const auto middle = std::find(names.begin(), names.end(), "d.logits");
  std::vector<std::string> reversed;
  for (auto name = names.rbegin(); name.base() != middle; ++name) reversed.push_back(name->substr(2));
  EXPECT_EQ(std::vector<std::string>(names.begin(), middle), reversed);
}

/// One traced training pass: every activation by name.
std::map<std::string, std::vector<double>> traced_forward(const GptConfig& model, const Batch& batch,
                                                          const DropoutStep& dropout) {
  std::map<std::string, std::vector<double>> activations;
  const Tracer<double> trace = [&](std::string_view name, std::span<const double> values) {
    activations[std::string(name)] = {values.begin(), values.end()};
  };
  const Pass<double> pass{.valid_tokens = batch.valid_tokens(), .dropout = dropout, .trace = trace};
  EXPECT_GT(loss(model, lively_parameters(model, 1), batch, pass), 0.0);
  return activations;
}

/// `after` = `before` + mask of (layer, site) * `branch`, the mask taken word by word from its definition.
void expect_residual_mask(const GptConfig& model, const Batch& batch, const DropoutKey& key, const std::vector<double>& before,
                          const std::vector<double>& branch, const std::vector<double>& after) {
  ASSERT_EQ(after.size(), branch.size());
  for (std::size_t i = 0; i < after.size(); ++i) {
    const auto hidden = static_cast<std::size_t>(model.hidden);
    const auto tokens = static_cast<std::size_t>(batch.sequence);
    const std::size_t token = i / hidden;
    const auto row_id = static_cast<std::uint64_t>(batch.row_ids[token / tokens]);
    const std::uint64_t element_index = (row_id * 8 + token % tokens) * hidden + i % hidden;
    const double factor = key.word(element_index) >= 0x80000000U ? 2.0 : 0.0;
    ASSERT_NEAR(after[i], (before.empty() ? 0.0 : before[i]) + factor * branch[i], 1e-14) << "element " << i;
  }
}

TEST(Gpt, TakesEveryMaskFromItsLayerSiteAndGlobalRow) {
  GptConfig model = small_model();
  Batch batch = ragged_batch(model, 7, {7, 5}, 2);
  batch.row_ids = {6, 3};
  const auto without = traced_forward(model, batch, {});
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.5;
  const DropoutStep step{40, 9};

  const auto with = traced_forward(model, batch, step);

  expect_residual_mask(model, batch, {40, 9, 0, DropoutSite::embedding}, {}, without.at("embedding"), with.at("embedding"));
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    const std::string block = "h." + std::to_string(layer);
    const std::vector<double>& input = layer == 0 ? with.at("embedding") : with.at("h.0");
    expect_residual_mask(model, batch, {40, 9, layer, DropoutSite::attention_residual}, input, with.at(block + ".attn.c_proj"),
                         with.at(block + ".middle"));
    expect_residual_mask(model, batch, {40, 9, layer, DropoutSite::mlp_residual}, with.at(block + ".middle"),
                         with.at(block + ".mlp.c_proj"), with.at(block));
    const AttentionInput attention{model.heads,
                                   model.hidden,
                                   {batch.row_ids, 7, 8},
                                   batch.document_starts,
                                   {0.5, {40, 9, layer, DropoutSite::attention_probability}}};
    std::vector<double> out(with.at(block + ".attn").size()), probabilities(2 * 3 * 7 * 7);
    attention_forward<double>(attention, with.at(block + ".attn.c_attn"), out, probabilities);
    EXPECT_EQ(out, with.at(block + ".attn"));
  }
}

TEST(Gpt, ABatchWithoutRowsAddsNothing) {
  const GptConfig model = small_model();
  NamedTensors<double> gradients = zero_tensors<double>(model);
  EXPECT_EQ(loss_and_gradients<double>(model, lively_parameters(model, 1), make_batch(0, 8), {.valid_tokens = 3}, gradients),
            0.0);
  EXPECT_EQ(gradients, zero_tensors<double>(model));
}

TEST(Gpt, RefusesTokensOutsideTheVocabulary) {
  const GptConfig model = small_model();
  Batch batch = ragged_batch(model, 8, {8}, 2);
  batch.ids[3] = 11;
  EXPECT_THROW(static_cast<void>(logits(model, lively_parameters(model, 1), batch)), InputError);
}

TEST(Gpt, RefusesANormaliserSmallerThanTheBatch) {
  const GptConfig model = small_model();
  const Batch batch = ragged_batch(model, 8, {8}, 2);
  EXPECT_THROW(static_cast<void>(loss<double>(model, lively_parameters(model, 1), batch, {.valid_tokens = 7})), ContractError);
}

TEST(Gpt, RefusesParametersOfAnotherModel) {
  const GptConfig model = small_model();
  const Batch batch = ragged_batch(model, 8, {8}, 2);
  NamedTensors<double> parameters = lively_parameters(model, 1);
  parameters.at("h.1.mlp.c_fc.bias").pop_back();
  try {
    static_cast<void>(logits(model, parameters, batch));
    FAIL() << "a short tensor was accepted";
  } catch (const ContractError& error) {
    EXPECT_NE(std::string(error.what()).find("h.1.mlp.c_fc.bias"), std::string::npos) << error.what();
  }
}

TEST(InitialParameters, AreTheSameNumbersInBothPrecisions) {
  const GptConfig model = small_model();
  const auto in_double = initial_parameters<double>(model, Initialization::scattered, 9);
  EXPECT_EQ(converted<double>(initial_parameters<float>(model, Initialization::scattered, 9)), in_double);
  EXPECT_NE(initial_parameters<double>(model, Initialization::scattered, 10), in_double);
}

}  // namespace
}  // namespace tandem::reference

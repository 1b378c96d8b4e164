// SPDX-License-Identifier: Apache-2.0
#include "reference/tensor_parallel.h"

#include <gtest/gtest.h>

#include <tuple>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/optimizer.h"
#include "reference/parallel_test_support.h"

namespace tandem::reference {
namespace {

using Layout = std::tuple<int, bool, bool>;  // ranks, sequence parallel, tied
class TensorRanks : public testing::TestWithParam<Layout> {
 protected:
  [[nodiscard]] static TensorParallelLayout layout() { return {std::get<0>(GetParam()), std::get<1>(GetParam())}; }
  GptConfig model_ = parallel_test_model(std::get<2>(GetParam()));
  NamedTensors<double> parameters_ = lively_parameters(model_, 1);
  Batch batch_ = parallel_test_batch(model_);
  Pass<double> pass_ = parallel_test_pass<double>(batch_);
};

TEST_P(TensorRanks, GiveTheGradientOfOneDevice) {
  const OneDeviceStep expected = one_device_step(model_, parameters_, batch_, pass_);

  const auto step = tensor_parallel_gradients(model_, parameters_, batch_, layout(), pass_);

  for (const RankGradients<double>& rank : step.ranks) EXPECT_NEAR(rank.loss, expected.loss, 1e-12 * expected.loss);
  EXPECT_LE(worst_deviation(joined_tensors(model_, step.ranks), expected.gradients), 1e-12);
}

TEST_P(TensorRanks, AgreeOnReplicatedGradients) {
  const auto step = tensor_parallel_gradients(model_, parameters_, batch_, layout(), pass_);

  for (const ParameterSpec& parameter : gpt_parameters(model_)) {
    if (tensor_split(parameter) != TensorSplit::replicated) continue;
    for (const auto& rank : step.ranks) {
      EXPECT_EQ(rank.gradients.at(parameter.name), step.ranks.front().gradients.at(parameter.name)) << parameter.name;
    }
  }
}

TEST_P(TensorRanks, NeverTrainPadding) {
  const auto step = tensor_parallel_gradients(model_, parameters_, batch_, layout(), pass_);

  const int ranks = layout().ranks;
  std::size_t padding = 0;
  for (const ParameterSpec& parameter : gpt_parameters(model_)) {
    for (int r = 0; r < ranks; ++r) {
      const auto indices = global_indices(tensor_shard(parameter, ranks, r));
      const auto& values = step.ranks[static_cast<std::size_t>(r)].gradients.at(parameter.name);
      ASSERT_EQ(values.size(), indices.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (indices[i] >= 0) continue;
        EXPECT_EQ(values[i], 0.0) << parameter.name;
        ++padding;
      }
    }
  }
  EXPECT_EQ(padding > 0, ranks > 1) << "13 rows have padding on every number of ranks but one";
}

TEST_P(TensorRanks, CountReplicatedParametersOnceInTheNorm) {
  const double expected = global_norm(one_device_step(model_, parameters_, batch_, pass_).gradients);

  const auto step = tensor_parallel_gradients(model_, parameters_, batch_, layout(), pass_);

  EXPECT_NEAR(tensor_parallel_norm(model_, step.ranks), expected, 1e-12 * expected);
}

TEST_P(TensorRanks, ExchangeWhatTheFormulaSays) {
  const std::int64_t tokens = batch_.rows * batch_.sequence;
  const auto step = tensor_parallel_gradients(model_, parameters_, batch_, layout(), pass_);

  EXPECT_EQ(step.exchanges, tensor_parallel_exchanges(model_, tokens, layout()));
}

TEST_P(TensorRanks, RoundInFloatAsOneDeviceDoes) {
  const OneDeviceStep expected = one_device_step(model_, parameters_, batch_, pass_);
  const auto step = tensor_parallel_gradients<float>(model_, converted<float>(parameters_), batch_, layout(),
                                                     parallel_test_pass<float>(batch_));

  // fp32 epsilon 1.2e-7 over a few dozen operations in a row.
  for (const auto& [name, values] : joined_tensors(model_, step.ranks)) {
    EXPECT_LE(relative_l2(values, expected.gradients.at(name)), 2e-5) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorRanks, testing::Combine(testing::Values(1, 2, 3, 4), testing::Bool(), testing::Bool()),
                         [](const auto& instance) {
                           return fmt::format("ranks{}{}{}", std::get<0>(instance.param),
                                              std::get<1>(instance.param) ? "_sequence" : "",
                                              std::get<2>(instance.param) ? "_tied" : "_untied");
                         });

TEST(TensorParallel, SendsTheSameVolumeWithSequenceParallelism) {
  const GptConfig model = parallel_test_model();
  const std::int64_t n = 5 * model.hidden;

  const auto plain = tensor_parallel_exchanges(model, 5, {4, false});
  const auto sequence = tensor_parallel_exchanges(model, 5, {4, true});

  EXPECT_EQ(plain.layers, model.layers * 4 * (8 * n * 3 / 4)) << "8 n (T-1)/T per rank and layer, four ranks";
  EXPECT_EQ(plain.layers, sequence.layers);
  EXPECT_EQ(plain.embedding, sequence.embedding);
  EXPECT_EQ(plain.head, sequence.head);
  EXPECT_EQ(plain.gradients, 0);
  EXPECT_EQ(sequence.gradients, 2 * 3 * (model.layers * 6 + 2 + model.sequence) * model.hidden);
}

TEST(TensorParallel, SlicesTheColumnsOfTheSameHeadsFromQueriesKeysAndValues) {
  const GptConfig model{.vocabulary = 5, .sequence = 2, .layers = 1, .hidden = 4, .heads = 2, .mlp_hidden = 4};
  NamedTensors<double> global = zero_tensors<double>(model);
  auto& weight = global.at("h.0.attn.c_attn.weight");
  for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<double>(i);

  const auto of_rank_1 = tensor_slices(model, global, 2, 1).at("h.0.attn.c_attn.weight");

  ASSERT_EQ(of_rank_1.size(), weight.size() / 2);
  EXPECT_EQ(std::vector<double>(of_rank_1.begin(), of_rank_1.begin() + 7), (std::vector<double>{2, 3, 6, 7, 10, 11, 14}));
}

TEST(TensorParallel, GivesBackWhatItSliced) {
  const GptConfig model = parallel_test_model(false);
  const NamedTensors<double> parameters = lively_parameters(model, 3);
  for (const int ranks : {1, 2, 3, 4, 6, 12}) {
    std::vector<RankGradients<double>> states;
    for (int r = 0; r < ranks; ++r) states.emplace_back().gradients = tensor_slices(model, parameters, ranks, r);
    EXPECT_EQ(joined_tensors(model, states), parameters) << ranks << " ranks";
  }
}

TEST(TensorParallel, WorksWhereARankHoldsPaddingAlone) {
  GptConfig model = parallel_test_model();
  model.vocabulary = 5;  // four ranks hold 2, 2, 1 and 0 tokens
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = parallel_test_batch(model);
  const Pass<double> pass = parallel_test_pass<double>(batch);

  const auto step = tensor_parallel_gradients(model, parameters, batch, {4, true}, pass);

  const OneDeviceStep expected = one_device_step(model, parameters, batch, pass);
  EXPECT_LE(worst_deviation(joined_tensors(model, step.ranks), expected.gradients), 1e-12);
}

TEST(TensorParallel, WorksWithFewerTokensThanRanks) {
  const GptConfig model = parallel_test_model();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = ragged_batch(model, 2, {2}, 4);
  const Pass<double> pass = parallel_test_pass<double>(batch);

  const auto step = tensor_parallel_gradients(model, parameters, batch, {4, true}, pass);

  const OneDeviceStep expected = one_device_step(model, parameters, batch, pass);
  EXPECT_LE(worst_deviation(joined_tensors(model, step.ranks), expected.gradients), 1e-12);
}

TEST(TensorParallel, GivesZerosForABatchWithoutRows) {
  const GptConfig model = parallel_test_model();
  const Batch none = slice_rows(parallel_test_batch(model), 0, 0);
  const auto step = tensor_parallel_gradients(model, lively_parameters(model, 1), none, {2, true}, {.valid_tokens = 14});

  EXPECT_EQ(joined_tensors(model, step.ranks), zero_tensors<double>(model));
  EXPECT_EQ(step.ranks[1].loss, 0.0);
}

TEST(TensorParallel, RefusesAStepWithFewerValidTokensThanTheBatch) {
  const GptConfig model = parallel_test_model();
  const Batch batch = parallel_test_batch(model);
  EXPECT_THROW(tensor_parallel_gradients(model, lively_parameters(model, 1), batch, {2, false},
                                         {.valid_tokens = batch.valid_tokens() - 1}),
               ContractError);
}

TEST(TensorParallel, RefusesRanksThatDoNotDivideTheHeads) {
  const GptConfig model = parallel_test_model();
  const Batch batch = parallel_test_batch(model);
  EXPECT_THROW(
      tensor_parallel_gradients(model, lively_parameters(model, 1), batch, {5, false}, parallel_test_pass<double>(batch)),
      ContractError);
}

}  // namespace
}  // namespace tandem::reference

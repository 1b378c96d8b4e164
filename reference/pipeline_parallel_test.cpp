// SPDX-License-Identifier: Apache-2.0
#include "reference/pipeline_parallel.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "reference/optimizer.h"
#include "reference/parallel_test_support.h"

namespace tandem::reference {
namespace {

GptConfig deep_model(bool tied) {
  GptConfig model = parallel_test_model(tied);
  model.layers = 5;
  return model;
}

struct Stages {
  std::string name;
  int ranks;
  std::vector<int> layers;
  int micro_batches;
  bool v_shaped;
  bool tied;
};

class PipelineRanks : public testing::TestWithParam<Stages> {
 protected:
  const Stages& stages_ = GetParam();
  GptConfig model_ = deep_model(stages_.tied);
  NamedTensors<double> parameters_ = lively_parameters(model_, 1);
  Batch batch_ = parallel_test_batch(model_);
  Pass<double> pass_ = parallel_test_pass<double>(batch_);
  PipelineParallelLayout layout_ =
      pipeline_stages(model_, stages_.ranks, stages_.layers, stages_.micro_batches, stages_.v_shaped);
};

TEST_P(PipelineRanks, GiveTheGradientOfOneDevice) {
  const OneDeviceStep expected = one_device_step(model_, parameters_, batch_, pass_);

  const auto step = pipeline_parallel_gradients(model_, parameters_, batch_, layout_, pass_);

  double loss = 0.0;
  for (const auto& rank : step.ranks) loss += rank.loss;
  EXPECT_NEAR(loss, expected.loss, 1e-12 * expected.loss);
  EXPECT_LE(worst_deviation(joined_stages(model_, layout_.stages, step.ranks), expected.gradients), 1e-12);
}

TEST_P(PipelineRanks, LeaveTheLossWithTheLastStage) {
  const auto step = pipeline_parallel_gradients(model_, parameters_, batch_, layout_, pass_);

  for (int r = 0; r < stages_.ranks; ++r) {
    EXPECT_EQ(step.ranks[static_cast<std::size_t>(r)].loss > 0.0, layout_.stages.holds_head(r)) << "rank " << r;
  }
}

TEST_P(PipelineRanks, HoldEqualGradientsInBothCopiesOfATiedEmbedding) {
  const auto step = pipeline_parallel_gradients(model_, parameters_, batch_, layout_, pass_);

  int copies = 0;
  for (const auto& rank : step.ranks) {
    const auto found = rank.gradients.find("wte.weight");
    if (found == rank.gradients.end()) continue;
    ++copies;
    EXPECT_EQ(found->second, joined_stages(model_, layout_.stages, step.ranks).at("wte.weight"));
  }
  EXPECT_EQ(copies, has_two_embeddings(model_, layout_.stages) ? 2 : 1);
}

TEST_P(PipelineRanks, CountATiedEmbeddingOnceInTheNorm) {
  const double expected = global_norm(one_device_step(model_, parameters_, batch_, pass_).gradients);

  const auto step = pipeline_parallel_gradients(model_, parameters_, batch_, layout_, pass_);

  EXPECT_NEAR(pipeline_parallel_norm(model_, layout_.stages, step.ranks), expected, 1e-12 * expected);
}

TEST_P(PipelineRanks, ExchangeWhatTheFormulaSays) {
  const auto step = pipeline_parallel_gradients(model_, parameters_, batch_, layout_, pass_);

  EXPECT_EQ(step.exchanges, pipeline_parallel_exchanges(model_, layout_.stages, batch_.rows * batch_.sequence));
}

INSTANTIATE_TEST_SUITE_P(Layouts, PipelineRanks,
                         testing::Values(Stages{"one_rank", 1, {5}, 1, false, true},  //
                                         Stages{"two_tied", 2, {4, 1}, 3, false, true},
                                         Stages{"two_untied", 2, {1, 4}, 3, false, false},
                                         Stages{"three_tied", 3, {1, 3, 1}, 4, false, true},
                                         Stages{"three_untied", 3, {2, 2, 1}, 1, false, false},
                                         Stages{"more_micro_batches_than_rows", 2, {3, 2}, 6, false, true},
                                         Stages{"five_tied", 5, {1, 1, 1, 1, 1}, 2, false, true},
                                         Stages{"wrapped_tied", 2, {1, 2, 1, 1}, 3, false, true},
                                         Stages{"v_shaped_tied", 2, {1, 2, 1, 1}, 3, true, true},
                                         Stages{"v_shaped_untied", 2, {2, 1, 1, 1}, 4, true, false}),
                         [](const auto& instance) { return instance.param.name; });

/// The order of arithmetic is that of one device with the same micro-batches, so nothing may differ at all where wte is not
/// summed from two copies.
TEST(PipelineParallel, IsBitwiseTheOneDeviceModelWhereNothingIsSummed) {
  const GptConfig model = deep_model(false);
  const NamedTensors<float> parameters = converted<float>(lively_parameters(model, 1));
  const Batch batch = parallel_test_batch(model);
  const Pass<float> pass = parallel_test_pass<float>(batch);
  const auto expected = local_gradients<float>(model, parameters, batch, {1, 3}, pass.dropout);

  const auto layout = pipeline_stages(model, 3, {1, 3, 1}, 3);
  const auto step = pipeline_parallel_gradients(model, parameters, batch, layout, pass);

  EXPECT_EQ(joined_stages(model, layout.stages, step.ranks), expected.front().gradients);
}

TEST(PipelineParallel, CarriesTheAuxiliaryLossOfExperts) {
  GptConfig model = deep_model(true);
  model.experts = 3;
  model.expert_choices = 2;
  model.auxiliary_loss_weight = 0.5;
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = parallel_test_batch(model);
  const Pass<double> pass = parallel_test_pass<double>(batch);
  const OneDeviceStep expected = one_device_step(model, parameters, batch, pass);

  const auto layout = pipeline_stages(model, 2, {2, 3}, 3);
  const auto step = pipeline_parallel_gradients(model, parameters, batch, layout, pass);

  EXPECT_LE(worst_deviation(joined_stages(model, layout.stages, step.ranks), expected.gradients), 1e-12);
}

TEST(PipelineParallel, RefusesStagesThatAreNotTheModel) {
  const GptConfig model = deep_model(true);
  EXPECT_THROW(pipeline_stages(model, 2, {2, 2}, 1), ContractError) << "a layer is missing";
  EXPECT_THROW(pipeline_stages(model, 2, {2, 2, 1}, 1), ContractError) << "three stages on two ranks";
  EXPECT_THROW(pipeline_stages(model, 2, {2, 3}, 1, true), ContractError) << "a V has two stages a rank";
}

}  // namespace
}  // namespace tandem::reference

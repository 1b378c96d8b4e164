// SPDX-License-Identifier: Apache-2.0
// A comparison of gradients is only worth something if wrong parallel training would not pass it. Each known mistake is made here
// on purpose: it must change gradients by far more than rounding, and where a comparison of losses would miss it, that is shown
// too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "reference/context_parallel.h"
#include "reference/hybrid_parallel.h"
#include "reference/model_ends.h"
#include "reference/optimizer.h"
#include "reference/parallel_test_support.h"
#include "reference/pipeline_parallel.h"
#include "reference/tensor_parallel.h"
#include "reference/vocabulary_parallel.h"

namespace tandem::reference {
namespace {

constexpr double kVisible = 1e-2;  // ten orders of magnitude above what the techniques' own tests allow
constexpr double kRounding = 1e-12;

class ParallelMistake : public testing::Test {
 protected:
  GptConfig model_ = parallel_test_model(true);
  NamedTensors<double> parameters_ = lively_parameters(model_, 1);
  Batch batch_ = parallel_test_batch(model_);
  Pass<double> pass_ = parallel_test_pass<double>(batch_);
  OneDeviceStep expected_ = one_device_step(model_, parameters_, batch_, pass_);

  [[nodiscard]] double deviation(const NamedTensors<double>& gradients) const {
    return worst_deviation(gradients, expected_.gradients);
  }

  /// One step whose gradient of the logits `spoil` may change.
  template <class Spoil>
  [[nodiscard]] OneDeviceStep step_with_logit_gradient(const Spoil& spoil) const {
    const PassContext<double> context{model_, parameters_, batch_, pass_};
    OneDeviceStep step{0.0, zero_tensors<double>(model_)};
    std::vector<BlockActivations<double>> blocks(static_cast<std::size_t>(model_.layers));
    std::vector<double> h = embed(context);
    for (int layer = 0; layer < model_.layers; ++layer) block_forward(context, layer, h, blocks[static_cast<std::size_t>(layer)]);
    HeadActivations<double> kept = head(context, std::move(h));
    step.loss = head_loss(context, kept);

    std::vector<double> dlogits(kept.logits.size()), dfinal(kept.last.size());
    cross_entropy_backward<double>(kept.logits, batch_.targets, pass_.valid_tokens, kept.log_sum_exp, dlogits);
    spoil(dlogits);
    head_backward<double>({context.tokens(), model_.hidden, model_.vocabulary}, kept.final.out, context.parameter("wte.weight"),
                          dlogits, dfinal, tensor(step.gradients, "wte.weight"));
    std::vector<double> dh = norm_backward<double>(context, "ln_f", kept.last, kept.final, dfinal, step.gradients);
    for (int layer = model_.layers - 1; layer >= 0; --layer) {
      block_backward(context, layer, blocks[static_cast<std::size_t>(layer)], dh, step.gradients);
    }
    embed_backward<double>(context, dh, step.gradients);
    return step;
  }
};

TEST_F(ParallelMistake, SoftmaxTermSkippedOffTheOwnerLeavesTheLossAndSpoilsTheGradient) {
  constexpr int kRanks = 3;
  const auto skip_off_owner = [&](std::vector<double>& dlogits) {
    for (std::size_t i = 0; i < dlogits.size(); ++i) {
      const auto token = static_cast<std::int64_t>(i) % model_.vocabulary;
      const std::int32_t target = batch_.targets[i / static_cast<std::size_t>(model_.vocabulary)];
      const std::int64_t rows = vocabulary_rows(model_.vocabulary, kRanks);
      if (target != kIgnoredTarget && target / rows != token / rows) dlogits[i] = 0.0;
    }
  };

  const OneDeviceStep right = step_with_logit_gradient([](std::vector<double>&) {});
  const OneDeviceStep wrong = step_with_logit_gradient(skip_off_owner);

  EXPECT_LE(deviation(right.gradients), kRounding);
  EXPECT_EQ(wrong.loss, expected_.loss) << "a comparison of losses sees nothing";
  for (const auto& [name, values] : expected_.gradients) {
    EXPECT_GT(relative_l2(wrong.gradients.at(name), values), kVisible) << name;
  }
}

TEST_F(ParallelMistake, PaddingInTheSoftmaxChangesTheLoss) {
  const std::int64_t vocabulary = 5;
  PerRank<double> logits = {random_values(3 * 2, 1), random_values(3 * 2, 2),
                            random_values(3 * 2, 3)};  // the last column is padding
  for (const std::size_t t : {0U, 1U, 2U}) logits[2][2 * t + 1] = 0.0;
  const std::vector<std::int32_t> targets = {4, 0, 2};

  const auto right = vocabulary_statistics<double>(logits, vocabulary, targets);
  const auto wrong = vocabulary_statistics<double>(logits, vocabulary + 1, targets);

  EXPECT_GT(vocabulary_loss<double>(wrong, targets, 3) - vocabulary_loss<double>(right, targets, 3), kVisible);
  EXPECT_NE(vocabulary_loss_backward<double>(logits, vocabulary + 1, wrong, targets, 3)[2][1], 0.0) << "padding would be trained";
  EXPECT_EQ(vocabulary_loss_backward<double>(logits, vocabulary, right, targets, 3)[2][1], 0.0);
}

TEST_F(ParallelMistake, RowBiasOnEveryRankIsAddedOnceForEach) {
  constexpr int kRanks = 4;
  std::vector<LockstepRank<double>> ranks;
  PerRank<double> x;
  for (int r = 0; r < kRanks; ++r) {
    ranks.push_back({tensor_slices(model_, parameters_, kRanks, r), {}});
    x.push_back(random_values(5 * 6, 10 + static_cast<std::uint64_t>(r)));  // 5 tokens, 24 / 4 columns
  }
  const PerRank<double> partial = row_linear_forward(ranks, "h.0.attn.c_proj", x);

  PerRank<double> right = {sum_over_ranks(partial)};
  bias_forward({ranks[0]}, "h.0.attn.c_proj", right);
  PerRank<double> each = partial;
  bias_forward(ranks, "h.0.attn.c_proj", each);

  const std::vector<double> wrong = sum_over_ranks(each);
  EXPECT_GT(relative_l2(wrong, right[0]), kVisible);
  const double bias = parameters_.at("h.0.attn.c_proj.bias")[7];
  EXPECT_NEAR(wrong[7] - right[0][7], (kRanks - 1) * bias, kRounding);
}

TEST_F(ParallelMistake, MissingSumOfReplicatedGradientsShowsOnlyInThem) {
  const auto step = tensor_parallel_local_gradients(model_, parameters_, batch_, {3, true}, pass_);

  EXPECT_NEAR(step.ranks.front().loss, expected_.loss, kRounding * expected_.loss) << "a comparison of losses sees nothing";
  const NamedTensors<double> joined = joined_tensors(model_, step.ranks);
  for (const ParameterSpec& parameter : gpt_parameters(model_)) {
    const double error = relative_l2(joined.at(parameter.name), expected_.gradients.at(parameter.name));
    if (tensor_split(parameter) == TensorSplit::replicated) {
      EXPECT_GT(error, kVisible) << parameter.name;
    } else {
      EXPECT_LE(error, kRounding) << parameter.name;
    }
  }
}

TEST_F(ParallelMistake, AveragedReplicatedGradientsAreTooSmallByTheNumberOfRanks) {
  const auto step = tensor_parallel_local_gradients(model_, parameters_, batch_, {3, true}, pass_);
  for (const std::string name : {"h.0.ln_1.weight", "h.1.ln_2.bias", "ln_f.weight"}) {
    PerRank<double> values;
    for (const auto& rank : step.ranks) values.push_back(rank.gradients.at(name));
    std::vector<double> average = sum_over_ranks(values);
    for (double& value : average) value /= 3.0;

    EXPECT_NEAR(relative_l2(average, expected_.gradients.at(name)), 2.0 / 3.0, kRounding) << name;
  }
}

TEST_F(ParallelMistake, CountingReplicatedParametersOnEveryRankRaisesTheNorm) {
  const auto step = tensor_parallel_gradients(model_, parameters_, batch_, {4, false}, pass_);
  double squares = 0.0;
  for (const auto& rank : step.ranks) squares += std::pow(global_norm(rank.gradients), 2);

  EXPECT_GT(std::sqrt(squares) / global_norm(expected_.gradients) - 1.0, kVisible);
}

TEST_F(ParallelMistake, InputGradientOfOneColumnRankIsNotTheWhole) {
  std::vector<LockstepRank<double>> ranks;
  const NamedTensors<double> zeros = zero_tensors<double>(model_);
  for (int r = 0; r < 2; ++r) ranks.push_back({tensor_slices(model_, parameters_, 2, r), tensor_slices(model_, zeros, 2, r)});
  const PerRank<double> x(2, random_values(5 * 24, 1));
  const PerRank<double> dy = {random_values(5 * 18, 2), random_values(5 * 18, 3)};

  const PerRank<double> dx = column_linear_backward(ranks, "h.0.mlp.c_fc", x, dy);

  EXPECT_GT(relative_l2(dx[0], sum_over_ranks(dx)), kVisible);
}

TEST_F(ParallelMistake, AttentionDropoutKeyedByLocalHeadChangesEveryRankButTheFirst) {
  const std::vector<double> qkv = random_values(batch_.ids.size() * 3 * 12, 1);  // half of the heads
  AttentionInput input{6,
                       12,
                       {batch_.row_ids, batch_.sequence, model_.sequence},
                       batch_.document_starts,
                       {0.1, {17, 2, 0, DropoutSite::attention_probability}},
                       12,
                       6};
  std::vector<double> right(batch_.ids.size() * 12), wrong = right, p(batch_.ids.size() * 6 * 9);
  attention_forward<double>(input, qkv, right, p);
  input.total_heads = input.first_head = 0;
  attention_forward<double>(input, qkv, wrong, p);

  EXPECT_GT(relative_l2(wrong, right), kVisible);
}

/// Queries of rank 0 of two context ranks over the keys of both.
struct RingParts {
  std::vector<ContextSlice> slices;
  PerRank<double> qkv;
  PartialAttention<double> own, other, merged;
};

RingParts ring_parts(const Batch& batch, bool local_positions) {
  RingParts ring;
  for (std::size_t c = 0; c < 2; ++c) {
    ContextSlice slice = context_slice(batch, 2, static_cast<int>(c));
    for (std::size_t i = 0; local_positions && i < slice.positions.size(); ++i) slice.positions[i] = static_cast<std::int64_t>(i);
    ring.qkv.push_back(random_values(slice.batch.ids.size() * 3 * 24, 1 + c));
    ring.slices.push_back(std::move(slice));
  }
  const RingAttentionInput input{12, 24, 11, ring.slices, {}};
  const auto third = [&](std::size_t c, std::size_t which) {
    std::vector<double> columns;
    for (std::size_t i = 0; i < ring.qkv[c].size(); ++i) {
      if (i % 72 / 24 == which) columns.push_back(ring.qkv[c][i]);
    }
    return columns;
  };
  ring.own = partial_attention<double>(input, 0, 0, ring.qkv[0], {third(0, 1), third(0, 2)});
  ring.other = partial_attention<double>(input, 0, 1, ring.qkv[0], {third(1, 1), third(1, 2)});
  ring.merged = ring.own;
  merge_partial(ring.other, ring.merged);
  return ring;
}

TEST_F(ParallelMistake, AveragedPartsOfTheRingAreNoAttention) {
  const RingParts ring = ring_parts(ragged_batch(model_, 9, {9, 9}, 1), false);
  std::vector<double> average = ring.own.out;
  for (std::size_t i = 0; i < average.size(); ++i) average[i] = (average[i] + ring.other.out[i]) / 2.0;

  EXPECT_GT(relative_l2(average, ring.merged.out), kVisible);
}

TEST_F(ParallelMistake, MaskByIndexInTheSliceShowsOtherKeys) {
  const Batch batch = ragged_batch(model_, 9, {9, 9}, 1);
  EXPECT_GT(relative_l2(ring_parts(batch, true).merged.out, ring_parts(batch, false).merged.out), kVisible);
}

TEST_F(ParallelMistake, ContextGradientsNotSummedAreOfOwnTokensOnly) {
  const auto step = context_parallel_local_gradients(model_, parameters_, batch_, {2}, pass_);
  for (const auto& rank : step.ranks) EXPECT_GT(deviation(rank.gradients), kVisible);
}

TEST_F(ParallelMistake, TiedEmbeddingNotSummedLeavesTheLossAndSpoilsOneTensor) {
  const auto layout = pipeline_stages(model_, 2, {1, 1}, 3);
  const auto step = pipeline_parallel_local_gradients(model_, parameters_, batch_, layout, pass_);

  EXPECT_NEAR(step.ranks.back().loss, expected_.loss, kRounding * expected_.loss) << "a comparison of losses sees nothing";
  const NamedTensors<double> joined = joined_stages(model_, layout.stages, step.ranks);
  for (const auto& [name, values] : expected_.gradients) {
    const double error = relative_l2(joined.at(name), values);
    EXPECT_TRUE(name == "wte.weight" ? error > kVisible : error <= kRounding) << name << " " << error;
  }
}

TEST_F(ParallelMistake, StageThatClipsByItsOwnNormScalesDifferently) {
  const auto layout = pipeline_stages(model_, 2, {1, 1}, 3);
  const auto step = pipeline_parallel_gradients(model_, parameters_, batch_, layout, pass_);
  const double whole = global_norm(expected_.gradients);

  for (const auto& rank : step.ranks) EXPECT_GT(1.0 - global_norm(rank.gradients) / whole, kVisible);
}

TEST_F(ParallelMistake, NormaliserOfEachMicroBatchWeighsTokensUnequally) {
  NamedTensors<double> gradients = zero_tensors<double>(model_);
  for (std::int64_t row = 0; row < batch_.rows; ++row) {
    const Batch own = slice_rows(batch_, row, 1);
    Pass<double> pass = pass_;
    pass.valid_tokens = std::max<std::int64_t>(1, own.valid_tokens()) * batch_.rows;
    loss_and_gradients(model_, parameters_, own, pass, gradients);
  }
  EXPECT_GT(deviation(gradients), kVisible);
}

TEST_F(ParallelMistake, LabelsOfAnotherMicroBatchGiveAnotherGradient) {
  Batch shifted = batch_;
  std::rotate(shifted.targets.begin(), shifted.targets.begin() + batch_.sequence, shifted.targets.end());
  EXPECT_GT(deviation(one_device_step(model_, parameters_, shifted, pass_).gradients), kVisible);
}

/// Gradients of data x tensor summed over the data groups of a grid.
double deviation_with_groups_of(const std::string& rank_order, const GptConfig& model, const NamedTensors<double>& parameters,
                                const Batch& batch, const Pass<double>& pass, const NamedTensors<double>& expected) {
  TrainingPlan plan;
  plan.parallel = {.data = 2, .tensor = 2};
  const HybridGrid grid = hybrid_grid(plan);
  plan.rank_order = rank_order;
  const HybridGrid grid_of_groups = hybrid_grid(plan);

  std::vector<RankGradients<double>> local;
  for (const Coordinates& at : grid.ranks) {
    const Interval rows = balanced_part(batch.rows, 2, at.data);
    const Batch own = slice_rows(batch, rows.begin, rows.size());
    const auto step = tensor_parallel_gradients(model, parameters, own, {2, false}, pass);
    local.push_back(step.ranks[static_cast<std::size_t>(at.tensor)]);
  }
  std::vector<RankGradients<double>> of_data_0(2);
  for (int r = 0; r < 4; ++r) {
    const Coordinates& at = grid.ranks[static_cast<std::size_t>(r)];
    if (at.data != 0) continue;
    std::vector<RankGradients<double>> group;
    for (const int member : hybrid_group(grid_of_groups, GroupAxis::gradient, r)) {
      group.push_back(local[static_cast<std::size_t>(member)]);
    }
    all_reduce_sum(group);
    of_data_0[static_cast<std::size_t>(at.tensor)] = group.front();
  }
  return worst_deviation(joined_tensors(model, of_data_0), expected);
}

TEST_F(ParallelMistake, GroupsOfATransposedGridAddSlicesThatDoNotBelongTogether) {
  model_.vocabulary = 14;  // slices of equal size, so that nothing but the numbers is wrong
  parameters_ = lively_parameters(model_, 1);
  expected_ = one_device_step(model_, parameters_, batch_, pass_);
  const auto with = [&](const std::string& order) {
    return deviation_with_groups_of(order, model_, parameters_, batch_, pass_, expected_.gradients);
  };
  EXPECT_LE(with("tensor-context-data-pipeline"), kRounding);
  EXPECT_GT(with("data-context-tensor-pipeline"), kVisible);
}

}  // namespace
}  // namespace tandem::reference

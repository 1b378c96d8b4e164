// SPDX-License-Identifier: Apache-2.0
#include "reference/expert_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

using Values = std::vector<double>;

constexpr DropoutStep kDropout{17, 2};

GptConfig expert_model(int experts, int choices) {
  GptConfig model{.vocabulary = 13, .sequence = 10, .layers = 2, .hidden = 12, .heads = 3, .mlp_hidden = 10};
  model.experts = experts;
  model.expert_choices = choices;
  model.capacity_factor = 0.9;
  model.auxiliary_loss_weight = 0.2;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1;
  return model;
}

/// Rows with very different numbers of valid tokens, one with none; fewer rows than some layouts have micro-batches.
Batch skewed_batch(const GptConfig& model, std::size_t rows) {
  std::vector<std::int64_t> lengths = {10, 1, 0, 4, 2, 7, 3};
  lengths.resize(rows);
  return ragged_batch(model, 10, lengths, 6);
}

struct Case {
  int data, expert, micro_batches;
  std::size_t rows;
};

class ExpertParallel : public testing::TestWithParam<std::tuple<Case, int>> {};

TEST_P(ExpertParallel, GivesTheGradientOfOneDevice) {
  const auto& [layout, choices] = GetParam();
  const GptConfig model = expert_model(12, choices);
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = skewed_batch(model, layout.rows);
  const auto expected = data_parallel_gradients<double>(model, parameters, batch, {1, 1}, kDropout);

  const auto got =
      expert_parallel_gradients<double>(model, parameters, batch, {layout.data, layout.expert, layout.micro_batches}, kDropout);

  ASSERT_GT(expected.routing.dropped_assignments, 0);
  ASSERT_GT(expected.routing.smallest_margin, 1e-12) << "another order of summation could choose otherwise";
  EXPECT_NEAR(got.loss, expected.loss, 1e-13 * expected.loss);
  EXPECT_NEAR(got.auxiliary_loss(), expected.auxiliary_loss(), 1e-14);
  EXPECT_LE(worst_deviation(got.gradients, expected.gradients), 1e-13);
  EXPECT_EQ(got.routing.kept_assignments, expected.routing.kept_assignments);
  EXPECT_EQ(got.routing.dropped_assignments, expected.routing.dropped_assignments);
}

INSTANTIATE_TEST_SUITE_P(Layouts, ExpertParallel,
                         testing::Combine(testing::Values(Case{1, 1, 1, 5}, Case{2, 2, 1, 5}, Case{2, 2, 2, 7}, Case{4, 2, 1, 7},
                                                          Case{4, 2, 2, 5}, Case{4, 4, 2, 6}, Case{4, 4, 1, 3}, Case{3, 3, 1, 5},
                                                          Case{3, 3, 3, 2}, Case{6, 3, 1, 4}, Case{4, 1, 1, 5}),
                                          testing::Values(1, 2)),
                         [](const auto& instance) {
                           const Case& layout = std::get<0>(instance.param);
                           return fmt::format("data{}_expert{}_accum{}_rows{}_choices{}", layout.data, layout.expert,
                                              layout.micro_batches, layout.rows, std::get<1>(instance.param));
                         });

TEST(ExpertParallelRanks, HoldTheirExpertsAndEverythingElse) {
  const GptConfig model = expert_model(6, 1);
  const auto ranks = expert_parallel_ranks<double>(model, lively_parameters(model, 1), {4, 2, 1});

  for (std::size_t rank = 0; rank < 4; ++rank) {
    for (const ParameterSpec& parameter : gpt_parameters(model)) {
      const bool own = parameter.expert < 0 || parameter.expert / 3 == static_cast<int>(rank % 2);
      EXPECT_EQ(ranks[rank].parameters.contains(parameter.name), own) << rank << " " << parameter.name;
      EXPECT_EQ(ranks[rank].gradients.contains(parameter.name), own) << rank << " " << parameter.name;
    }
  }
}

TEST(ExpertParallelRanks, WithoutRowsRunTheirExpertsForTheOthers) {
  const GptConfig model = expert_model(4, 2);
  const auto step =
      expert_parallel_local_gradients<double>(model, lively_parameters(model, 1), skewed_batch(model, 2), {4, 4, 1}, kDropout);

  for (const auto& [name, gradient] : step.ranks[3].gradients) {
    EXPECT_EQ(gradient == Values(gradient.size()), !name.starts_with("h.") || name.find("experts.3") == std::string::npos)
        << name;
  }
  EXPECT_EQ(step.losses[3], 0.0);
  EXPECT_EQ(step.routing[3].kept_assignments, 0);
}

TEST(ExpertParallelRanks, LeaveIdleExpertsWithoutGradient) {
  GptConfig model = expert_model(8, 1);
  model.layers = 1;
  NamedTensors<double> parameters = lively_parameters(model, 1);
  // ln_2 gives its bias alone, the same for every token: all choose the same expert.
  std::ranges::fill(parameters.at("h.0.ln_2.weight"), 0.0);

  const auto got = expert_parallel_gradients<double>(model, parameters, skewed_batch(model, 5), {4, 4, 1}, kDropout);

  int busy = 0;
  for (int expert = 0; expert < model.experts; ++expert) {
    const Values& gradient = got.gradients.at(expert_name("h.0.mlp", expert) + ".c_proj.bias");
    busy += gradient == Values(gradient.size()) ? 0 : 1;
  }
  EXPECT_EQ(busy, 1);
}

TEST(ExpertParallelRanks, AreRefusedWhereTheyDoNotDivide) {
  const GptConfig model = expert_model(6, 1);
  const NamedTensors<double> parameters = lively_parameters(model, 1);

  EXPECT_THROW(static_cast<void>(expert_parallel_ranks<double>(model, parameters, {4, 4, 1})), ContractError);
  EXPECT_THROW(static_cast<void>(expert_parallel_ranks<double>(model, parameters, {4, 3, 1})), ContractError);
  GptConfig dense = model;
  dense.experts = 0;
  EXPECT_THROW(static_cast<void>(expert_parallel_ranks<double>(dense, lively_parameters(dense, 1), {2, 2, 1})), ContractError);
}

/// One layer alone, on three ranks with 2, 0 and 1 rows.
struct Layer {
  GptConfig model;
  ExpertLayer sizes;
  NamedTensors<double> parameters;
  PerRank<double> x, dout;
};

Layer uneven_layer(int choices) {
  const GptConfig model = expert_model(6, choices);
  return {model,
          expert_layer(model, 4, 3),
          lively_parameters(model, 3),
          {random_values(2 * 4 * 12, 1), {}, random_values(4 * 12, 2)},
          {random_values(2 * 4 * 12, 3), {}, random_values(4 * 12, 4)}};
}

TEST(ExpertParallelLayer, IsTheLayerOfAllRowsOnOneDevice) {
  for (const int choices : {1, 2}) {
    const Layer layer = uneven_layer(choices);
    auto ranks = expert_parallel_ranks<double>(layer.model, layer.parameters, {3, 3, 1});
    const Values x = joined_over_ranks(layer.x), dout = joined_over_ranks(layer.dout);
    ExpertActivations<double> kept;
    NamedTensors<double> gradients = zero_tensors<double>(layer.model);
    const Values out = experts_forward<double>(layer.sizes, layer.parameters, "h.1.mlp", x, kept);
    const auto whole = experts_backward<double>(layer.sizes, layer.parameters, "h.1.mlp", x, kept, dout, gradients);

    std::vector<ExpertRankActivations<double>> kept_of_ranks;
    const PerRank<double> out_of_ranks = expert_parallel_forward<double>(layer.sizes, "h.1.mlp", ranks, layer.x, kept_of_ranks);
    const PerRank<double> dx = expert_parallel_backward<double>(layer.sizes, "h.1.mlp", ranks, kept_of_ranks, layer.dout);

    EXPECT_EQ(joined_over_ranks(out_of_ranks), out) << "each row is computed the same way wherever it is";
    EXPECT_EQ(joined_over_ranks(dx), whole.dx);
    PerRank<double> router;
    for (int rank = 0; rank < 3; ++rank) {
      const NamedTensors<double>& own = ranks[static_cast<std::size_t>(rank)].gradients;
      router.push_back(own.at("h.1.mlp.router.weight"));
      for (const int expert : {2 * rank, 2 * rank + 1}) {
        const std::string name = expert_name("h.1.mlp", expert) + ".c_fc.weight";
        EXPECT_EQ(own.at(name), gradients.at(name)) << "rows arrive in the order of the ranks, which is theirs";
      }
    }
    EXPECT_LE(relative_l2(sum_over_ranks(router), gradients.at("h.1.mlp.router.weight")), 1e-14);
  }
}

TEST(ExpertParallelLayer, RunsEachExpertOnTheRowsOfAllRanks) {
  const Layer layer = uneven_layer(2);
  const auto ranks = expert_parallel_ranks<double>(layer.model, layer.parameters, {3, 3, 1});
  std::vector<ExpertRankActivations<double>> kept;

  static_cast<void>(expert_parallel_forward<double>(layer.sizes, "h.1.mlp", ranks, layer.x, kept));

  for (std::size_t expert = 0; expert < 6; ++expert) {
    std::size_t taken = 0;
    for (const ExpertRankActivations<double>& rank : kept) taken += rank.routing.taken[expert].size();
    EXPECT_EQ(kept[expert / 2].own[expert % 2].x.size(), taken * 12);
  }
}

}  // namespace
}  // namespace tandem::reference

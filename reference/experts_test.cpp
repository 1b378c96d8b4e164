// SPDX-License-Identifier: Apache-2.0
#include "reference/experts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "reference/data_parallel.h"
#include "reference/test_support.h"
#include "reference/training.h"

namespace tandem::reference {
namespace {

using Values = std::vector<double>;

GptConfig expert_model(int experts, int choices, double dropout = 0.0) {
  GptConfig model{.vocabulary = 7, .sequence = 6, .layers = 2, .hidden = 6, .heads = 2, .mlp_hidden = 5};
  model.experts = experts;
  model.expert_choices = choices;
  model.capacity_factor = 0.9;
  model.auxiliary_loss_weight = 0.2;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = dropout;
  return model;
}

TEST(Experts, AddUpWhatTheyReturnByTheirGatesAndLeaveOutWhatIsDropped) {
  // Experts that return a constant, their bias; logits are x itself.
  const ExpertLayer layer{2, 1, 2, 3, 3, 1, 0.0, 1};
  NamedTensors<double> parameters{{"mlp.router.weight", {1, 0, 0, 1}}};
  for (const int e : {0, 1}) {
    const std::string expert = expert_name("mlp", e);
    parameters[expert + ".c_fc.weight"] = Values(6);
    parameters[expert + ".c_fc.bias"] = Values(3);
    parameters[expert + ".c_proj.weight"] = Values(6);
  }
  parameters["mlp.experts.0.c_proj.bias"] = {8, 16};
  parameters["mlp.experts.1.c_proj.bias"] = {-4, 0.5};
  const double high = std::log(3.0);  // gates of 3/4
  ExpertActivations<double> kept;

  const Values out = experts_forward<double>(layer, parameters, "mlp", Values{high, 0, high, 0, 0, high}, kept);

  const Values expected = {6, 12, 0, 0, -3, 0.375};
  ASSERT_EQ(out.size(), expected.size());
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected[i], 1e-14);
}

TEST(Experts, AllEqualAndWithRoomForAllAreADenseMlp) {
  GptConfig model = expert_model(3, 2);
  model.capacity_factor = 3.0;
  GptConfig dense = model;
  dense.experts = 0;
  const NamedTensors<double> of_dense = lively_parameters(dense, 4);
  NamedTensors<double> of_experts = lively_parameters(model, 4);
  for (auto& [name, values] : of_experts) {
    const std::size_t at = name.find(".experts.");
    if (name.find("mlp.router") == std::string::npos) {
      values = of_dense.at(at == std::string::npos ? name : name.substr(0, at) + name.substr(at + 10));
    }
  }
  const Batch batch = ragged_batch(model, 6, {6, 3}, 1);

  EXPECT_LE(relative_l2(logits(model, of_experts, batch), logits(dense, of_dense, batch)), 1e-14);
}

/// Seeds of parameters under which every expert is chosen and no choice is near a tie.
struct Case {
  int choices;
  double dropout;
  std::uint64_t seed;
};
class ExpertModelGradientCheck : public testing::TestWithParam<Case> {};

TEST_P(ExpertModelGradientCheck, EveryElementOfEveryParameter) {
  const GptConfig model = expert_model(3, GetParam().choices, GetParam().dropout);
  Batch batch = ragged_batch(model, 5, {5, 2, 4}, 3);
  batch.row_ids = {8, 0, 3};
  NamedTensors<double> parameters = lively_parameters(model, GetParam().seed);
  NamedTensors<double> gradients = zero_tensors<double>(model);
  RoutingRecord record;
  const Pass<double> pass{
      .valid_tokens = batch.valid_tokens() + 2, .global_rows = 5, .dropout = DropoutStep{21, 5}, .routing = &record};

  const double value = loss_and_gradients(model, parameters, batch, pass, gradients);

  ASSERT_GT(record.smallest_margin, 0.03) << "a finite difference would choose otherwise";
  ASSERT_GT(record.dropped_assignments, 0);
  ASSERT_GT(record.auxiliary_loss, 0.1);
  EXPECT_EQ(value, loss(model, parameters, batch, pass));
  for (auto& [name, values] : parameters) {
    expect_gradient(name, values, gradients.at(name), [&] {
      record = {};
      const double cross_entropy = loss(model, parameters, batch, pass);
      return cross_entropy + record.auxiliary_loss;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ExpertModelGradientCheck,
                         testing::Values(Case{1, 0.0, 1715}, Case{1, 0.2, 161}, Case{2, 0.0, 2273}, Case{2, 0.2, 2878}),
                         [](const auto& instance) {
                           return fmt::format("choices{}{}", instance.param.choices,
                                              instance.param.dropout > 0 ? "_dropout" : "");
                         });

TEST(Experts, InFloatAreWithinRoundingOfDouble) {
  for (const Case& seeds : {Case{1, 0.2, 161}, Case{2, 0.2, 2878}}) {
    const GptConfig model = expert_model(3, seeds.choices, seeds.dropout);
    Batch batch = ragged_batch(model, 5, {5, 2, 4}, 3);
    batch.row_ids = {8, 0, 3};
    const NamedTensors<double> parameters = lively_parameters(model, seeds.seed);
    const auto exact = data_parallel_gradients<double>(model, parameters, batch, {2, 1}, DropoutStep{21, 5});

    const auto rounded = data_parallel_gradients<float>(model, converted<float>(parameters), batch, {2, 1}, DropoutStep{21, 5});

    // Some tens of roundings of 6e-8 one after the other; a token routed otherwise would change everything by 0.1 and more.
    EXPECT_NEAR(rounded.loss, exact.loss, 1e-6 * exact.loss);
    EXPECT_NEAR(rounded.auxiliary_loss(), exact.auxiliary_loss(), 1e-6);
    EXPECT_LE(worst_deviation(converted<double>(rounded.gradients), exact.gradients), 1e-5);
    EXPECT_EQ(rounded.routing.kept_assignments, exact.routing.kept_assignments);
    EXPECT_NEAR(rounded.routing.smallest_margin, exact.routing.smallest_margin, 1e-6);
  }
}

TEST(Experts, ThatNoTokenChoosesHaveNoGradient) {
  const GptConfig model = expert_model(8, 1);
  const Batch batch = ragged_batch(model, 3, {3}, 3);
  std::set<int> chosen;
  NamedTensors<double> gradients = zero_tensors<double>(model);
  const Pass<double> pass{.valid_tokens = 3, .trace = [&](std::string_view name, std::span<const double> values) {
                            if (name != "h.1.mlp.router") return;
                            for (std::size_t t = 0; t < 3; ++t) {
                              const auto row = values.subspan(t * 8, 8);
                              chosen.insert(static_cast<int>(std::max_element(row.begin(), row.end()) - row.begin()));
                            }
                          }};

  loss_and_gradients<double>(model, lively_parameters(model, 4), batch, pass, gradients);

  ASSERT_FALSE(chosen.empty());
  for (int expert = 0; expert < model.experts; ++expert) {
    for (const std::string part : {"c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"}) {
      const Values& gradient = gradients.at(fmt::format("h.1.mlp.experts.{}.{}", expert, part));
      EXPECT_EQ(gradient == Values(gradient.size()), !chosen.contains(expert)) << expert << " " << part;
    }
  }
  const Values& router = gradients.at("h.1.mlp.router.weight");
  for (std::size_t i = 0; i < router.size(); ++i) EXPECT_NE(router[i], 0.0) << "every logit is part of the softmax";
}

TEST(Experts, AreTracedByTheirNames) {
  const GptConfig model = expert_model(3, 2);
  const Batch batch = ragged_batch(model, 5, {5, 2}, 3);
  std::vector<std::string> names;
  NamedTensors<double> gradients = zero_tensors<double>(model);
  const Pass<double> pass{.valid_tokens = 7, .trace = [&](std::string_view name, std::span<const double> values) {
                            if (name.find("h.1.mlp") == std::string_view::npos) return;
                            names.emplace_back(name);
                            EXPECT_EQ(values.size(), name.ends_with("router") ? 30U : 60U);
                          }};

  loss_and_gradients<double>(model, lively_parameters(model, 4), batch, pass, gradients);

  EXPECT_EQ(names, (std::vector<std::string>{"h.1.mlp.router", "h.1.mlp", "d.h.1.mlp", "d.h.1.mlp.router"}));
}

TEST(Experts, MultiplyWhatTheyKeepAlone) {
  GptConfig model = expert_model(3, 2);
  const Batch batch = ragged_batch(model, 5, {5, 2}, 3);
  const NamedTensors<double> parameters = lively_parameters(model, 4);
  const auto count_of = [&](double capacity_factor, RoutingRecord& record) {
    model.capacity_factor = capacity_factor;
    MultiplyAdds count;
    static_cast<void>(loss<double>(model, parameters, batch, {.valid_tokens = 7, .multiply_adds = &count, .routing = &record}));
    return count.linear;
  };
  RoutingRecord all, some;

  const std::int64_t of_all = count_of(3.0, all);
  const std::int64_t of_some = count_of(0.5, some);

  EXPECT_EQ(all.kept_assignments, model.layers * 10 * 2);
  EXPECT_EQ(all.dropped_assignments, 0);
  EXPECT_EQ(some.kept_assignments + some.dropped_assignments, all.kept_assignments);
  EXPECT_EQ(of_all - of_some, some.dropped_assignments * 2 * model.hidden * model.mlp_width());
}

using Layout = std::tuple<int, int, int>;
class ExpertModelLayouts : public testing::TestWithParam<Layout> {};

TEST_P(ExpertModelLayouts, GiveTheGradientOfOneRank) {
  const auto [choices, ranks, micro_batches] = GetParam();
  const GptConfig model = expert_model(3, choices, 0.1);
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = ragged_batch(model, 6, {6, 1, 0, 4, 2}, 6);
  const auto expected = data_parallel_gradients<double>(model, parameters, batch, {1, 1}, DropoutStep{17, 2});

  const auto got = data_parallel_gradients<double>(model, parameters, batch, {ranks, micro_batches}, DropoutStep{17, 2});

  ASSERT_GT(expected.routing.dropped_assignments, 0);
  EXPECT_NEAR(got.loss, expected.loss, 1e-13 * expected.loss);
  EXPECT_NEAR(got.auxiliary_loss(), expected.auxiliary_loss(), 1e-14);
  EXPECT_LE(worst_deviation(got.gradients, expected.gradients), 1e-13);
  EXPECT_EQ(got.routing.kept_assignments, expected.routing.kept_assignments);
  EXPECT_EQ(got.routing.dropped_assignments, expected.routing.dropped_assignments);
  EXPECT_EQ(got.routing.smallest_margin, expected.routing.smallest_margin);
}

INSTANTIATE_TEST_SUITE_P(Layouts, ExpertModelLayouts,
                         testing::Combine(testing::Values(1, 2), testing::Values(1, 2, 3, 7), testing::Values(1, 3)),
                         [](const auto& instance) {
                           return fmt::format("choices{}_ranks{}_accum{}", std::get<0>(instance.param),
                                              std::get<1>(instance.param), std::get<2>(instance.param));
                         });

TEST(Experts, TrainToALowerLossAndRecordTheirRouting) {
  GptConfig model = expert_model(4, 2);
  const Batch batch = ragged_batch(model, 6, {6, 6, 6, 6}, 6);
  TrainingRun run;
  run.model = model;
  run.layout = {2, 2};
  run.steps = 80;
  run.batch = [&](std::int64_t) { return batch; };
  run.optimizer.learning_rate = 1e-2;

  const TrainingRecord<double> record = train<double>(run);

  EXPECT_LT(record.losses.back(), 0.5 * record.losses.front());
  ASSERT_EQ(record.auxiliary_losses.size(), 80U);
  for (std::size_t step = 0; step < 80; ++step) {
    EXPECT_GT(record.auxiliary_losses[step], 0.0);
    EXPECT_EQ(record.kept_assignments[step] + record.dropped_assignments[step], model.layers * 24 * 2);
  }
  EXPECT_GT(record.smallest_margin, 0.0);
  EXPECT_LT(record.smallest_margin, 0.5);
}

}  // namespace
}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
// Plausible ways to get experts wrong, made here on purpose. Each must change gradients far beyond rounding, or a comparison of
// gradients could not find it; where a mistake hides, that is shown too.
#include <gtest/gtest.h>

#include <algorithm>

#include "reference/expert_parallel.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

using Values = std::vector<double>;

enum class Mistake { none, gates_not_renormalised, dropped_in_slot_zero, no_auxiliary_loss, gates_swapped };

/// One layer of experts, two rows, some assignments dropped.
struct Layer {
  ExpertLayer sizes{4, 2, 6, 5, 5, 2, 0.2, 2};
  NamedTensors<double> parameters;
  Values x = random_values(2 * 5 * 6, 2560);  // no choice near a tie, expert 0 drops tokens
  Values dout = random_values(2 * 5 * 6, 2, 0.1);

  Layer() {
    parameters["mlp.router.weight"] = random_values(6 * 4, 3);
    for (int e = 0; e < 4; ++e) {
      const auto seed = static_cast<std::uint64_t>(10 * e);
      parameters[expert_name("mlp", e) + ".c_fc.weight"] = random_values(6 * 5, seed + 4);
      parameters[expert_name("mlp", e) + ".c_fc.bias"] = random_values(5, seed + 5);
      parameters[expert_name("mlp", e) + ".c_proj.weight"] = random_values(5 * 6, seed + 6);
      parameters[expert_name("mlp", e) + ".c_proj.bias"] = random_values(6, seed + 7);
    }
  }
};

void make_mistake(Mistake mistake, const ExpertLayer& sizes, Routing<double>& routing) {
  if (mistake == Mistake::gates_not_renormalised) {
    for (std::size_t i = 0; i < routing.gates.size(); ++i) {
      const std::size_t token = i / static_cast<std::size_t>(sizes.choices);
      routing.gates[i] =
          routing.probabilities[token * static_cast<std::size_t>(sizes.experts) + static_cast<std::size_t>(routing.chosen[i])];
    }
  }
  if (mistake == Mistake::gates_swapped) {
    for (std::size_t t = 0; t < routing.gates.size(); t += 2) std::swap(routing.gates[t], routing.gates[t + 1]);
  }
}

/// What a dropped assignment adds where its slot is 0: the gate times what the expert returned for the first token of the row.
void add_from_slot_zero(const ExpertLayer& sizes, const Routing<double>& routing, const OfExperts<double>& y, Values& out) {
  for (std::size_t i = 0; i < routing.slots.size(); ++i) {
    if (routing.slots[i] != kDropped) continue;
    const auto token = static_cast<std::int64_t>(i) / sizes.choices;
    const auto expert = static_cast<std::size_t>(routing.chosen[i]);
    const std::vector<Assignment>& taken = routing.taken[expert];
    const auto first = std::ranges::find_if(
        taken, [&](const Assignment& other) { return other.token / sizes.row_tokens == token / sizes.row_tokens; });
    const auto row = static_cast<std::size_t>(first - taken.begin());
    for (std::size_t c = 0; c < 6; ++c) out[static_cast<std::size_t>(token) * 6 + c] += routing.gates[i] * y[expert][row * 6 + c];
  }
}

/// dout . out + auxiliary loss, which is what the gradients are of.
double value_with(Mistake mistake, const Layer& layer) {
  Routing<double> routing = route<double>(layer.sizes, layer.x, tensor(layer.parameters, "mlp.router.weight"));
  make_mistake(mistake, layer.sizes, routing);
  OfExperts<double> y;
  for (int e = 0; e < layer.sizes.experts; ++e) {
    const auto rows = gather_assigned<double>(layer.x, 6, routing.taken[static_cast<std::size_t>(e)]);
    y.push_back(expert_forward<double>(layer.sizes, layer.parameters, expert_name("mlp", e), rows).y);
  }
  Values out = combine(layer.sizes, routing, y);
  if (mistake == Mistake::dropped_in_slot_zero) add_from_slot_zero(layer.sizes, routing, y, out);
  double value = mistake == Mistake::no_auxiliary_loss ? 0.0 : auxiliary_loss(layer.sizes, routing);
  for (std::size_t i = 0; i < out.size(); ++i) value += out[i] * layer.dout[i];
  return value;
}

/// Relative L2 between the gradients of backward and those of the layer with the mistake, by x, the router and expert 0's c_proj.
struct Change {
  double x, router, expert;
};

Change change_by(Mistake mistake) {
  Layer layer;
  ExpertActivations<double> kept;
  NamedTensors<double> gradients;
  for (const auto& [name, values] : layer.parameters) gradients[name].resize(values.size());
  static_cast<void>(experts_forward<double>(layer.sizes, layer.parameters, "mlp", layer.x, kept));
  const Values dx = experts_backward<double>(layer.sizes, layer.parameters, "mlp", layer.x, kept, layer.dout, gradients).dx;
  RoutingRecord record;
  add_to_record(layer.sizes, kept.routing, record);
  EXPECT_GT(record.smallest_margin, 0.05) << "a finite difference would choose otherwise";
  EXPECT_GT(record.dropped_assignments, 0);

  const auto derivative = [&](Values& by) {
    Values result;
    for (double& element : by) result.push_back(finite_difference(element, [&] { return value_with(mistake, layer); }));
    return result;
  };
  const std::string router = "mlp.router.weight", expert = "mlp.experts.0.c_proj.weight";
  return {relative_l2(derivative(layer.x), dx), relative_l2(derivative(layer.parameters.at(router)), gradients.at(router)),
          relative_l2(derivative(layer.parameters.at(expert)), gradients.at(expert))};
}

TEST(ExpertMistake, NoneLeavesNoTrace) {
  const Change change = change_by(Mistake::none);
  EXPECT_LT(std::max({change.x, change.router, change.expert}), 1e-9);
}

TEST(ExpertMistake, GatesNotRenormalisedShowEverywhere) {
  const Change change = change_by(Mistake::gates_not_renormalised);
  EXPECT_GT(std::min({change.x, change.router, change.expert}), 0.1);
}

TEST(ExpertMistake, DroppedTokensInSlotZeroShowEverywhere) {
  const Change change = change_by(Mistake::dropped_in_slot_zero);
  EXPECT_GT(std::min({change.x, change.router, change.expert}), 0.1);
}

TEST(ExpertMistake, GatesOfTheOtherChoiceShowEverywhere) {
  const Change change = change_by(Mistake::gates_swapped);
  EXPECT_GT(std::min({change.x, change.router, change.expert}), 0.1);
}

TEST(ExpertMistake, AuxiliaryLossForgottenShowsInTheRouterAndAboveItOnly) {
  const Change change = change_by(Mistake::no_auxiliary_loss);
  EXPECT_GT(change.router, 1e-2);
  EXPECT_GT(change.x, 1e-3);
  EXPECT_LT(change.expert, 1e-9) << "an expert's own gradient cannot tell";
}

GptConfig expert_model() {
  GptConfig model{.vocabulary = 13, .sequence = 10, .layers = 2, .hidden = 12, .heads = 3, .mlp_hidden = 10};
  model.experts = 4;
  model.expert_choices = 2;
  model.auxiliary_loss_weight = 0.05;
  return model;
}

/// Gradients whose auxiliary loss is divided by the rows of each micro-batch: summed, or averaged as if that mended it.
NamedTensors<double> with_auxiliary_loss_per_micro_batch(const GptConfig& model, const NamedTensors<double>& parameters,
                                                         const Batch& batch, int micro_batches, bool averaged) {
  NamedTensors<double> gradients = zero_tensors<double>(model);
  GptConfig weighted = model;
  if (averaged) weighted.auxiliary_loss_weight /= micro_batches;
  for (int i = 0; i < micro_batches; ++i) {
    const Interval rows = micro_batch_rows(batch.rows, 1, 0, micro_batches, i);
    const Pass<double> pass{.valid_tokens = batch.valid_tokens()};
    loss_and_gradients(weighted, parameters, slice_rows(batch, rows.begin, rows.size()), pass, gradients);
  }
  return gradients;
}

TEST(ExpertMistake, AuxiliaryLossPerMicroBatchShowsInTheRouter) {
  const GptConfig model = expert_model();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch uneven = ragged_batch(model, 10, {10, 1, 0, 4, 2}, 6);
  const Batch even = slice_rows(uneven, 0, 4);
  const auto change = [&](const Batch& batch, bool averaged) {
    const auto expected = data_parallel_gradients<double>(model, parameters, batch, {1, 2}, {}).gradients;
    return worst_deviation(with_auxiliary_loss_per_micro_batch(model, parameters, batch, 2, averaged), expected);
  };

  EXPECT_GT(change(uneven, false), 1e-2);
  EXPECT_GT(change(even, false), 1e-2);
  EXPECT_GT(change(uneven, true), 1e-4);
  EXPECT_LT(change(even, true), 1e-13) << "an average hides where all micro-batches have equally many rows";
}

TEST(ExpertMistake, ExpertGradientsSummedOverAllDataRanksMixDifferentExperts) {
  const GptConfig model = expert_model();
  const NamedTensors<double> parameters = lively_parameters(model, 1);
  const Batch batch = ragged_batch(model, 10, {10, 1, 0, 4, 2}, 6);
  const auto expected = data_parallel_gradients<double>(model, parameters, batch, {1, 1}, {}).gradients;

  const auto step = expert_parallel_local_gradients<double>(model, parameters, batch, {2, 2, 1}, {});
  // Own expert 0 of rank 0 and own expert 0 of rank 1, which is expert 2.
  const PerRank<double> mixed = {step.ranks[0].gradients.at("h.0.mlp.experts.0.c_fc.weight"),
                                 step.ranks[1].gradients.at("h.0.mlp.experts.2.c_fc.weight")};

  EXPECT_LT(relative_l2(mixed[0], expected.at("h.0.mlp.experts.0.c_fc.weight")), 1e-13);
  EXPECT_GT(relative_l2(sum_over_ranks(mixed), expected.at("h.0.mlp.experts.0.c_fc.weight")), 0.1);
}

}  // namespace
}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
#include "optimized/expert_parallel/routing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "core/rng.h"
#include "reference/routing.h"

namespace tandem {
namespace {

RoutingShape shape_of(std::int64_t rows, std::int64_t tokens, int experts, int choices, std::int64_t capacity) {
  RoutingShape shape{
      rows, tokens, tokens, experts, choices, capacity, std::vector<std::int64_t>(static_cast<std::size_t>(tokens))};
  std::iota(shape.positions.begin(), shape.positions.end(), std::int64_t{0});
  return shape;
}

template <class Real>
void check_choices_and_gates() {
  const double eps = static_cast<double>(std::numeric_limits<Real>::epsilon());
  const RoutingShape shape = shape_of(1, 3, 3, 2, 9);
  // p = {1, 2, 5} / 8, then a tie of the last two, then a tie of all.
  std::vector<Real> logits = {Real(std::log(1.0)), Real(std::log(2.0)), Real(std::log(5.0)), 0, 1, 1, -3, -3, -3};
  std::vector<Real> p(9), gates(6), gates_of_one(3);
  std::vector<std::int32_t> choices;

  softmax_choices(view_of(logits, {3, 3}), shape, view_of(p, {3, 3}), choices);
  choice_gates(view_of(p, {3, 3}), shape, choices, view_of(gates, {3, 2}));

  EXPECT_EQ(choices, (std::vector<std::int32_t>{2, 1, 1, 2, 0, 1}));
  EXPECT_NEAR(p[0], 0.125, eps);
  EXPECT_NEAR(p[2], 0.625, eps);
  EXPECT_NEAR(gates[0], 5.0 / 7, 2 * eps);
  EXPECT_NEAR(gates[1], 2.0 / 7, 2 * eps);
  EXPECT_EQ(gates[2], Real(0.5));

  const RoutingShape one = shape_of(1, 3, 3, 1, 9);
  softmax_choices(view_of(logits, {3, 3}), one, view_of(p, {3, 3}), choices);
  choice_gates(view_of(p, {3, 3}), one, choices, view_of(gates_of_one, {3, 1}));
  EXPECT_EQ(choices, (std::vector<std::int32_t>{2, 1, 0}));
  EXPECT_EQ(gates_of_one[0], p[2]);
}
TEST(Routing, ChoosesTheLargestProbabilitiesAndTheSmallestIndexOnTies) {
  check_choices_and_gates<float>();
  check_choices_and_gates<double>();
}

TEST(Routing, ProbabilitiesMayOverwriteTheLogits) {
  const RoutingShape shape = shape_of(1, 2, 3, 2, 1);
  std::vector<float> logits = {0.5F, -1, 2, 3, 3, 1}, p(6);
  std::vector<std::int32_t> choices, choices_in_place;
  softmax_choices(view_of(logits, {2, 3}), shape, view_of(p, {2, 3}), choices);
  softmax_choices(view_of(logits, {2, 3}), shape, view_of(logits, {2, 3}), choices_in_place);
  EXPECT_EQ(logits, p);
  EXPECT_EQ(choices, choices_in_place);
}

TEST(Routing, FirstChoicesFillTheCapacityBeforeSecondOnes) {
  // One row of four tokens, capacity 2. Expert 0 is the first choice of tokens 1 and 3 and the second of 0 and 2: both second
  // choices are dropped though token 0 stands first.
  const RoutingShape shape = shape_of(1, 4, 3, 2, 2);
  const std::vector<std::int32_t> choices = {1, 0, 0, 2, 1, 0, 0, 1};
  EXPECT_EQ(assign_slots(shape, choices), (std::vector<std::int32_t>{0, -1, 0, 0, 1, -1, 1, -1}));
}

TEST(Routing, CapacityIsCountedPerRow) {
  const RoutingShape shape = shape_of(2, 3, 2, 1, 2);
  EXPECT_EQ(assign_slots(shape, std::vector<std::int32_t>{0, 0, 0, 0, 1, 0}), (std::vector<std::int32_t>{0, 1, -1, 0, 0, 1}));
}

TEST(Routing, FractionsCountFirstChoicesOfWholeRows) {
  const RoutingShape shape = shape_of(2, 4, 2, 2, 1);
  const std::vector<std::int32_t> choices = {0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0};
  EXPECT_EQ(first_choice_fractions(shape, choices), (std::vector<double>{0.75, 0.25, 0, 1}));
}

TEST(Routing, LocalEntriesFollowThePositions) {
  RoutingShape shape = shape_of(2, 4, 3, 2, 4);
  shape.local_tokens = 2;
  shape.positions = {0, 3};
  const std::vector<std::int32_t> slots = {0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17};
  EXPECT_EQ(local_entries(shape, slots), (std::vector<std::int32_t>{0, 1, 6, 7, 10, 11, 16, 17}));
}

TEST(Routing, AuxiliaryLossByHand) {
  // Two of the R = 4 rows, S = 2, E = 2, weight 0.5: 0.5 / 4 * 2 * (1 * (0.5 + 0.75) / 2 + (0.5 * 0.5 + 0.5 * 1.5) / 2).
  const RoutingShape shape = shape_of(2, 2, 2, 1, 2);
  std::vector<double> p = {0.5, 0.5, 0.75, 0.25, 0.25, 0.75, 0.25, 0.75};
  const std::vector<double> fractions = {1, 0, 0.5, 0.5};
  EXPECT_DOUBLE_EQ(auxiliary_loss_share(view_of(p, {4, 2}), shape, fractions, 0.5, 4), 0.25 * (0.625 + 0.5));
}

TEST(Routing, AuxiliaryLossIsTheWeightUnderEvenLoadAndSharesOfARowAddUp) {
  const RoutingShape shape = shape_of(1, 4, 4, 1, 1);
  std::vector<double> p(16, 0.25);
  const std::vector<double> fractions(4, 0.25);
  EXPECT_DOUBLE_EQ(auxiliary_loss_share(view_of(p, {4, 4}), shape, fractions, 0.01, 1), 0.01);
  RoutingShape half = shape;
  half.local_tokens = 2;
  half.positions = {0, 3};
  EXPECT_DOUBLE_EQ(auxiliary_loss_share(view_of(p, {4, 4}).rows(0, 2), half, fractions, 0.01, 1), 0.005);
}

/// sum of weights * gates + auxiliary loss with f held, as a function of the logits.
double objective(std::vector<double> logits, const RoutingShape& shape, std::span<const double> weights,
                 const RoutingGradient& gradient, std::span<const std::int32_t> held) {
  const std::int64_t tokens = shape.rows * shape.local_tokens;
  std::vector<double> p(logits.size()), gates(static_cast<std::size_t>(tokens * shape.choices));
  std::vector<std::int32_t> choices;
  softmax_choices(view_of(logits, {tokens, shape.experts}), shape, view_of(p, {tokens, shape.experts}), choices);
  EXPECT_EQ(choices, std::vector<std::int32_t>(held.begin(), held.end()));
  choice_gates(view_of(p, {tokens, shape.experts}), shape, choices, view_of(gates, {tokens, shape.choices}));
  double total = std::inner_product(gates.begin(), gates.end(), weights.begin(), 0.0);
  if (!gradient.add_auxiliary) return total;
  // The weight of which auxiliary_scale is weight * E / (R * S), with R = 1.
  const double weight = gradient.auxiliary_scale * static_cast<double>(shape.row_tokens) / shape.experts;
  return total + auxiliary_loss_share(view_of(p, {tokens, shape.experts}), shape, gradient.fractions, weight, 1);
}

void check_gradient(int experts, int choices_per_token, bool add_auxiliary) {
  SCOPED_TRACE(::testing::Message() << experts << " experts, " << choices_per_token << " choices");
  const RoutingShape shape = shape_of(2, 5, experts, choices_per_token, 3);
  const std::int64_t tokens = 10;
  CounterRng rng(3, "routing");
  std::vector<double> logits(static_cast<std::size_t>(tokens * experts)), p(logits.size()), dlogits(logits.size());
  for (double& value : logits) value = rng.next_normal();
  std::vector<std::int32_t> choices;
  softmax_choices(view_of(logits, {tokens, experts}), shape, view_of(p, {tokens, experts}), choices);
  std::vector<double> dgates(choices.size());
  for (std::size_t i = 0; i < dgates.size(); ++i) dgates[i] = i % 4 == 1 ? 0.0 : rng.next_normal();  // some dropped
  std::vector<double> fractions = first_choice_fractions(shape, choices);
  const RoutingGradient gradient{fractions, 0.3, add_auxiliary};

  routing_backward(view_of(dgates, {tokens, choices_per_token}), view_of(p, {tokens, experts}), shape, choices, gradient,
                   view_of(dlogits, {tokens, experts}));

  constexpr double kStep = 1e-6;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    std::vector<double> up = logits, down = logits;
    up[i] += kStep;
    down[i] -= kStep;
    const double slope =
        (objective(up, shape, dgates, gradient, choices) - objective(down, shape, dgates, gradient, choices)) / (2 * kStep);
    // Central difference: h^2 of the third derivative, and eps / h of rounding.
    EXPECT_NEAR(dlogits[i], slope, 1e-8) << "logit " << i;
  }
}
TEST(Routing, BackwardIsTheSlopeOfGatesAndAuxiliaryLoss) {
  check_gradient(4, 1, true);
  check_gradient(4, 2, true);
  check_gradient(3, 2, false);
  check_gradient(2, 2, true);
  check_gradient(1, 1, true);
}

TEST(Routing, BackwardByHandInSingle) {
  // p = {0.5, 0.3, 0.2}, choices 0 and 1, dgates {1, 0}: dp_0 = 0.3 / 0.64, dp_1 = -0.5 / 0.64, their mean under p is 0.
  const RoutingShape shape = shape_of(1, 1, 3, 2, 1);
  std::vector<float> p = {0.5F, 0.3F, 0.2F}, dgates = {1, 0}, dlogits(3);
  routing_backward(view_of(dgates, {1, 2}), view_of(p, {1, 3}), shape, std::vector<std::int32_t>{0, 1},
                   {.fractions = {}, .auxiliary_scale = 5, .add_auxiliary = false}, view_of(dlogits, {1, 3}));
  EXPECT_NEAR(dlogits[0], 0.5 * 0.3 / 0.64, 1e-7);
  EXPECT_NEAR(dlogits[1], -0.3 * 0.5 / 0.64, 1e-7);
  EXPECT_NEAR(dlogits[2], 0, 1e-7);
}

/// All of it on the logits of the definition, in the same precision.
template <class Real>
void check_against_definition(int experts, int choices_per_token, std::int64_t capacity) {
  SCOPED_TRACE(::testing::Message() << experts << " experts, " << choices_per_token << " choices, capacity " << capacity);
  constexpr std::int64_t kRows = 3, kLength = 17, kTokens = kRows * kLength, kHidden = 5, kGlobalRows = 8;
  constexpr double kWeight = 0.7;
  const reference::ExpertLayer layer{experts, choices_per_token, kHidden, 4, kLength, capacity, kWeight, kGlobalRows};
  CounterRng rng(11, "routing");
  const auto random = [&](std::int64_t count) {
    std::vector<Real> values(static_cast<std::size_t>(count));
    for (Real& value : values) value = static_cast<Real>(rng.next_normal());
    return values;
  };
  const std::vector<Real> x = random(kTokens * kHidden), router = random(kHidden * experts);
  auto truth = reference::route<Real>(layer, x, router);
  const RoutingShape shape = shape_of(kRows, kLength, experts, choices_per_token, capacity);
  std::vector<Real> p(truth.logits.size()), gates(truth.gates.size()), dlogits(p.size());
  const TensorView probabilities = view_of(p, {kTokens, experts});
  std::vector<std::int32_t> choices;

  softmax_choices(view_of(truth.logits, {kTokens, experts}), shape, probabilities, choices);
  choice_gates(probabilities, shape, choices, view_of(gates, {kTokens, choices_per_token}));
  const std::vector<std::int32_t> slots = assign_slots(shape, choices);
  const std::vector<double> fractions = first_choice_fractions(shape, choices);

  EXPECT_EQ(choices, truth.chosen);
  EXPECT_EQ(slots, truth.slots);
  const double eps = static_cast<double>(std::numeric_limits<Real>::epsilon());
  for (std::size_t i = 0; i < fractions.size(); ++i) EXPECT_NEAR(fractions[i], truth.first_shares[i], 1e-15);
  for (std::size_t i = 0; i < p.size(); ++i) ASSERT_NEAR(p[i], truth.probabilities[i], 4 * eps * (1 + experts));
  for (std::size_t i = 0; i < gates.size(); ++i) ASSERT_NEAR(gates[i], truth.gates[i], 8 * eps * (1 + experts));
  EXPECT_NEAR(auxiliary_loss_share(probabilities, shape, fractions, kWeight, kGlobalRows),
              reference::auxiliary_loss(layer, truth), 4 * eps * kTokens);

  std::vector<Real> dgates = random(static_cast<std::int64_t>(gates.size())), dweight(router.size());
  for (std::size_t i = 0; i < dgates.size(); ++i) dgates[i] = slots[i] < 0 ? Real(0) : dgates[i];
  const RoutingGradient gradient{fractions, kWeight * experts / static_cast<double>(kGlobalRows * kLength), true};
  routing_backward(view_of(dgates, {kTokens, choices_per_token}), probabilities, shape, choices, gradient,
                   view_of(dlogits, {kTokens, experts}));
  const auto expected = reference::route_backward<Real>(layer, x, router, truth, dgates, dweight);
  // Numbers of size up to 4 (a normal gate gradient over a sum of two probabilities of at least 2 / experts).
  for (std::size_t i = 0; i < dlogits.size(); ++i) ASSERT_NEAR(dlogits[i], expected.dlogits[i], 32 * eps * (1 + experts)) << i;
}
TEST(Routing, IsTheDefinition) {
  for (const std::int64_t capacity : {1, 3, 5, 17}) {
    for (const int choices : {1, 2}) {
      check_against_definition<float>(4, choices, capacity);
      check_against_definition<double>(4, choices, capacity);
      check_against_definition<double>(7, choices, capacity);
    }
  }
  check_against_definition<double>(1, 1, 9);
}

TEST(Routing, NoRowsAreLegal) {
  const RoutingShape shape = shape_of(0, 4, 2, 2, 2);
  std::vector<float> none;
  std::vector<std::int32_t> choices = {1};
  softmax_choices(view_of(none, {0, 2}), shape, view_of(none, {0, 2}), choices);
  EXPECT_TRUE(choices.empty());
  EXPECT_TRUE(assign_slots(shape, {}).empty());
  EXPECT_EQ(auxiliary_loss_share(view_of(none, {0, 2}), shape, {}, 0.1, 0), 0);
  routing_backward(view_of(none, {0, 2}), view_of(none, {0, 2}), shape, {}, {}, view_of(none, {0, 2}));
}

TEST(Routing, RefusesWhatDoesNotFit) {
  EXPECT_THROW((void)assign_slots(shape_of(1, 2, 2, 1, 1), std::vector<std::int32_t>{0, 2}), ContractError);
  EXPECT_THROW((void)assign_slots(shape_of(1, 2, 2, 1, 1), std::vector<std::int32_t>{0}), ContractError);
  EXPECT_THROW((void)assign_slots(shape_of(1, 2, 1, 2, 1), std::vector<std::int32_t>{0, 0, 0, 0}), ContractError);
}

}  // namespace
}  // namespace tandem

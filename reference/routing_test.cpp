// SPDX-License-Identifier: Apache-2.0
#include "reference/routing.h"

#include <gtest/gtest.h>

#include <cmath>

#include "reference/test_support.h"

namespace tandem::reference {
namespace {

using Values = std::vector<double>;
using Slots = std::vector<std::int32_t>;

/// Rows of `row_tokens` tokens whose logits are given: as many channels as experts, and the identity for a router.
Routing<double> route_logits(const ExpertLayer& layer, const Values& logits) {
  Values identity(static_cast<std::size_t>(layer.experts * layer.experts));
  for (int e = 0; e < layer.experts; ++e) identity[static_cast<std::size_t>(e * (layer.experts + 1))] = 1.0;
  return route<double>(layer, logits, identity);
}

ExpertLayer layer_of(int experts, int choices, std::int64_t row_tokens, std::int64_t capacity) {
  return {experts, choices, experts, 4, row_tokens, capacity, 0.01, 1};
}

/// Logits whose softmax is these probabilities.
Values logs(Values probabilities) {
  for (double& p : probabilities) p = std::log(p);
  return probabilities;
}

TEST(Routing, FillsSlotsInTheOrderOfTheTokensAndDropsWhatIsTooMuch) {
  const Routing<double> routing = route_logits(layer_of(2, 1, 4, 2), logs({.75, .25, .75, .25, .25, .75, .75, .25}));

  EXPECT_EQ(routing.chosen, Slots({0, 0, 1, 0}));
  EXPECT_EQ(routing.slots, Slots({0, 1, 0, kDropped}));
  for (const double gate : routing.gates) EXPECT_NEAR(gate, 0.75, 1e-15);
  EXPECT_EQ(routing.taken[0], (std::vector<Assignment>{{0, 0}, {1, 0}}));
  EXPECT_EQ(routing.taken[1], (std::vector<Assignment>{{2, 0}}));
}

TEST(Routing, GivesFirstChoicesTheirSlotsBeforeSecondOnes) {
  // Expert 1 is full with the first choices of tokens 1 and 2 when the second choice of token 0 comes.
  const Routing<double> routing = route_logits(layer_of(3, 2, 3, 2), logs({.6, .3, .1, .2, .7, .1, .1, .5, .4}));

  EXPECT_EQ(routing.chosen, Slots({0, 1, 1, 0, 1, 2}));
  EXPECT_EQ(routing.slots, Slots({0, kDropped, 0, 1, 1, 0}));
  EXPECT_EQ(routing.taken[0], (std::vector<Assignment>{{0, 0}, {1, 1}}));
  EXPECT_EQ(routing.taken[1], (std::vector<Assignment>{{1, 0}, {2, 0}}));
  EXPECT_EQ(routing.taken[2], (std::vector<Assignment>{{2, 1}}));
  EXPECT_NEAR(routing.gates[0], 2.0 / 3.0, 1e-15) << "the gate of the choice that is left does not grow";
  EXPECT_NEAR(routing.gates[4], 5.0 / 9.0, 1e-15);
  EXPECT_NEAR(routing.gates[5], 4.0 / 9.0, 1e-15);
}

TEST(Routing, CountsCapacityRowByRow) {
  const Values row = logs({.75, .25, .75, .25, .25, .75, .75, .25});
  Values rows = row;
  rows.insert(rows.end(), row.begin(), row.end());

  const Routing<double> routing = route_logits(layer_of(2, 1, 4, 2), rows);

  EXPECT_EQ(routing.slots, Slots({0, 1, 0, kDropped, 0, 1, 0, kDropped}));
  EXPECT_EQ(routing.taken[0], (std::vector<Assignment>{{0, 0}, {1, 0}, {4, 0}, {5, 0}})) << "row after row";
}

TEST(Routing, TakesTheSmallestIndexAmongEquals) {
  EXPECT_EQ(route_logits(layer_of(3, 1, 1, 1), {1, 2, 2}).chosen, Slots({1}));
  EXPECT_EQ(route_logits(layer_of(3, 2, 1, 1), {2, 1, 2}).chosen, Slots({0, 2}));
  EXPECT_EQ(route_logits(layer_of(3, 2, 1, 1), {1, 2, 1}).chosen, Slots({1, 0}));
}

TEST(Routing, AuxiliaryLossIsThatOfTheFormula) {
  ExpertLayer layer = layer_of(2, 1, 4, 1);
  layer.global_rows = 3;
  // f = (3/4, 1/4), P = (5/8, 3/8): E sum f P = 9/8. Capacity plays no part.
  const Routing<double> routing = route_logits(layer, logs({.75, .25, .75, .25, .25, .75, .75, .25}));

  EXPECT_EQ(routing.first_shares, Values({0.75, 0.25}));
  EXPECT_NEAR(auxiliary_loss(layer, routing), 0.01 / 3.0 * 9.0 / 8.0, 1e-17);
  EXPECT_NEAR(auxiliary_loss(layer_of(2, 1, 2, 1), route_logits(layer_of(2, 1, 2, 1), {0, 1, 1, 0})), 0.01, 1e-17) << "even load";
  EXPECT_EQ(auxiliary_loss(layer, route_logits(layer, {})), 0.0);
}

TEST(Routing, RecordCountsAssignmentsAndFindsTheNarrowestDecision) {
  RoutingRecord record;
  EXPECT_EQ(record.smallest_margin, INFINITY);
  const Values logits = logs({.6, .3, .1, .2, .7, .1, .1, .5, .4});

  add_to_record(layer_of(3, 1, 3, 1), route_logits(layer_of(3, 1, 3, 1), logits), record);
  EXPECT_EQ(record.kept_assignments, 2);
  EXPECT_EQ(record.dropped_assignments, 1);
  EXPECT_NEAR(record.smallest_margin, 0.1, 1e-15);

  const Values logits_2 = logs({.6, .22, .18, .2, .7, .1, .1, .5, .4});
  add_to_record(layer_of(3, 1, 3, 1), route_logits(layer_of(3, 1, 3, 1), logits_2), record);
  EXPECT_NEAR(record.smallest_margin, 0.1, 1e-15) << "with one choice the second and the third do not compete";
  add_to_record(layer_of(3, 2, 3, 2), route_logits(layer_of(3, 2, 3, 2), logits_2), record);
  EXPECT_NEAR(record.smallest_margin, 0.04, 1e-15);
  EXPECT_EQ(record.kept_assignments, 2 + 2 + 5);
  EXPECT_EQ(record.dropped_assignments, 1 + 1 + 1);
}

TEST(Routing, OfOneExpertDecidesNothing) {
  RoutingRecord record;
  const Routing<double> routing = route_logits(layer_of(1, 1, 2, 2), {3, -1});

  add_to_record(layer_of(1, 1, 2, 2), routing, record);

  EXPECT_EQ(routing.gates, Values({1, 1}));
  EXPECT_EQ(record.smallest_margin, INFINITY);
}

class RouterGradientCheck : public testing::TestWithParam<int> {};

TEST_P(RouterGradientCheck, OfGatesAndAuxiliaryLoss) {
  const ExpertLayer layer{4, GetParam(), 6, 4, 5, 2, 0.3, 3};
  Values x = random_values(2 * 5 * 6, 1), weight = random_values(6 * 4, 2);
  Values dgates = random_values(2 * 5 * static_cast<std::size_t>(layer.choices), 3);
  const Routing<double> routing = route<double>(layer, x, weight);
  RoutingRecord record;
  add_to_record(layer, routing, record);
  ASSERT_GT(record.smallest_margin, 1e-2) << "a finite difference would choose otherwise";
  Values dweight(weight.size());

  const RouterGradients<double> gradients = route_backward<double>(layer, x, weight, routing, dgates, dweight);

  const auto f = [&] {
    const Routing<double> moved = route<double>(layer, x, weight);
    double sum = auxiliary_loss(layer, moved);
    for (std::size_t i = 0; i < dgates.size(); ++i) sum += dgates[i] * moved.gates[i];
    return sum;
  };
  expect_gradient("x", x, gradients.dx, f);
  expect_gradient("weight", weight, dweight, f);
}

INSTANTIATE_TEST_SUITE_P(Choices, RouterGradientCheck, testing::Values(1, 2), testing::PrintToStringParamName());

}  // namespace
}  // namespace tandem::reference

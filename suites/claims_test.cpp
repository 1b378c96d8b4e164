// SPDX-License-Identifier: Apache-2.0
#include "suites/claims.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "harness/registry.h"
#include "suites/suites.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

double& value_of(ClaimFindings& findings, const ClaimCondition& condition) {
  const auto found = std::find_if(findings.figures.begin(), findings.figures.end(),
                                  [&](const ClaimFigure& figure) { return figure.key == condition.figure; });
  ClaimFigure& figure = found != findings.figures.end()
                            ? *found
                            : findings.figures.emplace_back(ClaimFigure{.key = condition.figure, .what = {}, .unit = {}});
  return condition.of == Of::measured ? figure.measured : figure.predicted;
}

// Figures that meet every condition: at its limit, and with limits on both sides between them.
ClaimFindings made_up(const std::vector<ClaimCondition>& conditions) {
  ClaimFindings findings;
  for (const ClaimCondition& condition : conditions) {
    double low = -INFINITY, high = INFINITY;
    for (const ClaimCondition& other : conditions) {
      if (other.figure != condition.figure || other.of != condition.of) continue;
      if (other.relation == Relation::at_least) low = std::max(low, other.limit);
      if (other.relation == Relation::at_most) high = std::min(high, other.limit);
    }
    value_of(findings, condition) = std::isinf(low) ? high : std::isinf(high) ? low : (low + high) / 2;
  }
  return findings;
}

double beyond(const ClaimCondition& condition) {
  const double step = std::max(1e-6, 1e-6 * std::abs(condition.limit));
  return condition.relation == Relation::at_most ? condition.limit + step : condition.limit - step;
}

bool names(const ClaimJudgement& judgement, const ClaimCondition& condition) {
  return std::any_of(judgement.unmet.begin(), judgement.unmet.end(),
                     [&](const ClaimCondition& unmet) { return unmet.because == condition.because; });
}

const Claim& claim_of(const std::vector<Claim>& all, const std::string& id) {
  return *std::find_if(all.begin(), all.end(), [&](const Claim& claim) { return claim.id == id; });
}

double& measured(ClaimFindings& findings, const std::string& key) {
  return std::find_if(findings.figures.begin(), findings.figures.end(),
                      [&](const ClaimFigure& figure) { return figure.key == key; })
      ->measured;
}

TEST(Claims, AreTwentyOneInOrderWithNoFieldEmpty) {
  for (const ClaimEffort effort : {ClaimEffort::quick, ClaimEffort::usual}) {
    const std::vector<Claim> all = all_claims(effort);

    ASSERT_EQ(all.size(), 21U);
    std::set<std::string> statements;
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i].id, fmt::format("C{:02}", i + 1));
      EXPECT_FALSE(all[i].section.empty()) << all[i].id;
      EXPECT_TRUE(all[i].command.starts_with("tandem ")) << all[i].id;
      EXPECT_TRUE(all[i].find && all[i].say) << all[i].id;
      EXPECT_GE(all[i].conditions.size(), 2U) << all[i].id;
      statements.insert(all[i].stated);
      for (const ClaimCondition& condition : all[i].conditions) {
        EXPECT_FALSE(condition.because.empty()) << all[i].id;
        EXPECT_NE(condition.otherwise, ClaimVerdict::holds) << all[i].id;
        EXPECT_NE(condition.relation, Relation::equal) << all[i].id;
      }
    }
    EXPECT_EQ(statements.size(), all.size());
  }
}

TEST(Claims, HoldWhereEveryConditionIsMetAndNotWhereOneIsBroken) {
  for (const Claim& claim : all_claims(ClaimEffort::quick)) {
    const ClaimFindings good = made_up(claim.conditions);
    EXPECT_EQ(judge(claim.conditions, good).verdict, ClaimVerdict::holds) << claim.id;

    for (const ClaimCondition& condition : claim.conditions) {
      for (const double wrong : {beyond(condition), kNoFigure}) {
        ClaimFindings bad = good;
        value_of(bad, condition) = wrong;
        const ClaimJudgement judgement = judge(claim.conditions, bad);

        EXPECT_GE(judgement.verdict, condition.otherwise) << claim.id << " " << condition.figure << " = " << wrong;
        EXPECT_TRUE(names(judgement, condition)) << claim.id << " " << condition.figure << " = " << wrong;
      }
    }
  }
}

// The cases that a command names: words after "tandem run" that are no options.
std::vector<std::string> patterns_of(const std::string& command) {
  std::vector<std::string> patterns;
  bool runs = false;
  std::istringstream words(command);
  for (std::string word, before; words >> word; before = word) {
    if (word == "run" && before == "tandem") {
      runs = true;
      continue;
    }
    const bool ends = word.ends_with(";");
    if (ends) word.pop_back();
    if (runs && !word.starts_with("-")) patterns.push_back(word);
    if (ends) runs = false;
  }
  return patterns;
}

TEST(Claims, NameCasesThatThereAre) {
  const CaseList cases = all_cases({});
  std::size_t named = 0;
  for (const Claim& claim : all_claims(ClaimEffort::usual)) {
    for (const std::string& pattern : patterns_of(claim.command)) {
      const std::vector<std::string> one = {pattern};
      EXPECT_NO_THROW(static_cast<void>(select_cases(cases, one, Tier::full))) << claim.id << " " << pattern;
      ++named;
    }
  }
  EXPECT_GT(named, 20U);
}

TEST(Claims, OfTwoBrokenConditionsTheWorseDecides) {
  const std::vector<ClaimCondition> conditions = {
      {"cost", Of::measured, Relation::at_most, 0.3, ClaimVerdict::holds_within_limits, "dear"},
      {"gain", Of::predicted, Relation::at_least, 2, ClaimVerdict::imprecise, "small"}};
  ClaimFindings findings;
  findings.figures = {{"cost", "", kNoFigure, kNoFigure, 0.4, "share"}, {"gain", "", kNoFigure, 1, kNoFigure, "x"}};

  const ClaimJudgement judgement = judge(conditions, findings);

  EXPECT_EQ(judgement.verdict, ClaimVerdict::imprecise);
  EXPECT_EQ(judgement.unmet.size(), 2U);
}

TEST(Claims, DemandTheFiguresThatTheirConditionsAreAbout) {
  const Claim claim = all_claims(ClaimEffort::quick).front();

  EXPECT_THROW(static_cast<void>(judge(claim.conditions, {})), ContractError);
}

// C14 from end to end, and again with figures that are not so.
TEST(Claims, FollowFromWhatWasMeasured) {
  const std::vector<Claim> all = all_claims(ClaimEffort::quick);
  const Claim& sharding = claim_of(all, "C14");
  const ClaimFindings found = sharding.find({});

  const ClaimResult result = judge(sharding, found);
  EXPECT_EQ(result.verdict, ClaimVerdict::imprecise) << result.reason;
  EXPECT_NE(result.reason.find("no price on top"), std::string::npos) << result.reason;
  EXPECT_NEAR(found.measured("share8"), 0.125, 0.005);

  ClaimFindings as_stated = found;
  measured(as_stated, "extra_bytes") = 0.5;
  EXPECT_EQ(judge(sharding, as_stated).verdict, ClaimVerdict::holds);

  ClaimFindings not_sharded = found;
  measured(not_sharded, "worst_share") = 8;
  EXPECT_EQ(judge(sharding, not_sharded).verdict, ClaimVerdict::does_not_hold);
}

TEST(Claims, OfUnderflowTellsFp16FromBf16) {
  const std::vector<Claim> all = all_claims(ClaimEffort::quick);
  const Claim& underflow = claim_of(all, "C11");
  const ClaimFindings found = underflow.find({});

  EXPECT_EQ(judge(underflow, found).verdict, ClaimVerdict::holds_within_limits);
  EXPECT_GT(found.measured("vanish"), 0.25);
  EXPECT_EQ(found.measured("vanish_bf16"), 0);

  ClaimFindings nothing_vanishes = found;
  measured(nothing_vanishes, "vanish") = 0;
  EXPECT_EQ(judge(underflow, nothing_vanishes).verdict, ClaimVerdict::does_not_hold);
}

TEST(Claims, FiguresAreSaidWithTheirUnit) {
  EXPECT_EQ(say_figure(kNoFigure, "x"), "-");
  EXPECT_EQ(say_figure(0.5, "share"), "50.0 %");
  EXPECT_EQ(say_figure(18, "B/parameter"), "18 B/parameter");
  EXPECT_EQ(say_figure(2.4142, "x"), "2.41 x");
  EXPECT_EQ(say_figure(0.012, "s"), "12.0 ms");
  EXPECT_EQ(say_figure(4608, "tokens"), "4608 tokens");
}

}  // namespace
}  // namespace tandem

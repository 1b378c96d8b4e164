// SPDX-License-Identifier: Apache-2.0
#include "harness/covering_array.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

std::vector<int> first_factors(int count) {
  std::vector<int> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

CoveringProblem uniform(int factors, int values) {
  CoveringProblem problem;
  for (int i = 0; i < factors; ++i) problem.factors.push_back({fmt::format("f{}", i), values});
  problem.pairwise = {first_factors(factors)};
  return problem;
}

// Whether some row has these values, by looking at all rows: what coverage() must agree with.
bool contains(const std::vector<Row>& rows, const std::vector<int>& factors, const std::vector<int>& values) {
  return std::ranges::any_of(rows, [&](const Row& row) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      if (row[static_cast<std::size_t>(factors[i])] != values[i]) return false;
    }
    return true;
  });
}

// The rows of the whole product that are legal.
std::vector<Row> legal_product(const CoveringProblem& problem) {
  std::vector<Row> rows = {{}};
  for (const CoveringFactor& factor : problem.factors) {
    std::vector<Row> longer;
    for (const Row& row : rows) {
      for (int value = 0; value < factor.num_values; ++value) {
        longer.push_back(row);
        longer.back().push_back(value);
      }
    }
    rows = std::move(longer);
  }
  std::erase_if(rows, [&](const Row& row) { return problem.legal && !problem.legal(row); });
  return rows;
}

// Sizes of degrees 1, 2, 4 or options; at most eight ranks, and options that need others.
enum Factor { tensor, pipeline, context, expert, data, chunks, accumulation, tying, dropout, sequence, placement, schedule };
CoveringProblem like_hybrid_parallelism() {
  CoveringProblem problem;
  problem.factors = {{"tensor", 3},       {"pipeline", 3}, {"context", 2}, {"expert", 2},   {"data", 3},      {"chunks", 2},
                     {"accumulation", 3}, {"tying", 2},    {"dropout", 2}, {"sequence", 2}, {"placement", 3}, {"schedule", 4}};
  problem.legal = [](const Row& row) {
    const int ranks = 1 << (row[tensor] + row[pipeline] + row[context] + row[data]);
    if (ranks > 8 || row[expert] > row[data]) return false;
    if (row[sequence] == 1 && row[tensor] == 0) return false;
    if (row[chunks] == 1 && (row[pipeline] == 0 || row[schedule] < 2)) return false;
    return row[pipeline] > 0 || row[schedule] == 0;
  };
  problem.pairwise = {first_factors(12)};
  problem.triplewise = {{tensor, pipeline, chunks, data, accumulation, tying, dropout, sequence}};
  return problem;
}

TEST(CoveringArray, FindsTheKnownSizesOfSmallArrays) {
  const std::vector<Row> two_by_three = covering_array(uniform(3, 2));
  EXPECT_EQ(two_by_three.size(), 4U) << "CA(2, 3, 2)";
  EXPECT_EQ(std::set<Row>(two_by_three.begin(), two_by_three.end()).size(), 4U);
  EXPECT_EQ(covering_array(uniform(4, 3)).size(), 9U) << "CA(2, 4, 3), an orthogonal array";
  EXPECT_EQ(covering_array(uniform(2, 4)).size(), 16U) << "the product itself";

  CoveringProblem triples = uniform(4, 2);
  triples.triplewise = {first_factors(4)};
  EXPECT_EQ(covering_array(triples).size(), 8U) << "CA(3, 4, 2)";
  EXPECT_TRUE(coverage(covering_array(triples), triples).complete());
}

TEST(CoveringArray, CoversOnlyWhatTheGroupsName) {
  CoveringProblem problem = uniform(5, 3);
  problem.pairwise = {{0, 1}, {3, 4}};
  const std::vector<Row> rows = covering_array(problem);
  EXPECT_EQ(rows.size(), 9U);
  EXPECT_EQ(coverage(rows, problem).tuples, 18);

  problem.pairwise = {};
  EXPECT_TRUE(covering_array(problem).empty());
}

TEST(CoveringArray, CountsAPairOfTwoGroupsOnce) {
  CoveringProblem problem = uniform(3, 2);
  problem.pairwise = {{0, 1}, {1, 0, 2}};
  EXPECT_EQ(coverage({}, problem).tuples, 12);
}

TEST(CoveringArray, CoversEveryPairAndTripleThatALegalRowCanHold) {
  const CoveringProblem problem = like_hybrid_parallelism();
  const std::vector<Row> rows = covering_array(problem);
  const std::vector<Row> all = legal_product(problem);
  for (const Row& row : rows) EXPECT_TRUE(problem.legal(row));

  int holes = 0;
  int impossible = 0;
  const auto check = [&](const std::vector<int>& factors) {
    std::vector<int> values(factors.size(), 0);
    for (bool more = true; more;) {
      const bool possible = contains(all, factors, values);
      impossible += possible ? 0 : 1;
      holes += possible && !contains(rows, factors, values) ? 1 : 0;
      std::size_t i = 0;
      while (i < values.size() && ++values[i] == problem.factors[static_cast<std::size_t>(factors[i])].num_values)
        values[i++] = 0;
      more = i < values.size();
    }
  };
  const std::vector<int>& group = problem.triplewise[0];
  for (int a = 0; a < 12; ++a) {
    for (int b = a + 1; b < 12; ++b) check({a, b});
  }
  for (std::size_t a = 0; a < group.size(); ++a) {
    for (std::size_t b = a + 1; b < group.size(); ++b) {
      for (std::size_t c = b + 1; c < group.size(); ++c) check({group[a], group[b], group[c]});
    }
  }

  EXPECT_EQ(holes, 0);
  EXPECT_GT(impossible, 0);
  EXPECT_LT(rows.size(), 60U);
  const CoverageReport report = coverage(rows, problem);
  EXPECT_TRUE(report.complete());
  EXPECT_EQ(report.impossible.size(), static_cast<std::size_t>(impossible));
  EXPECT_EQ(report.covered + impossible, report.tuples);
}

TEST(CoveringArray, GivesTheSameRowsForTheSameSeed) {
  CoveringProblem problem = uniform(6, 3);
  const std::vector<Row> rows = covering_array(problem);
  EXPECT_EQ(covering_array(problem), rows);
  problem.seed = 2;
  EXPECT_NE(covering_array(problem), rows);
  EXPECT_TRUE(coverage(covering_array(problem), problem).complete());
}

TEST(CoveringArray, FindsATupleThatOneLegalRowOfManyHolds) {
  CoveringProblem problem = uniform(16, 2);
  problem.legal = [](const Row& row) {
    const auto ones = std::count(row.begin(), row.end(), 1);
    return row[0] == 0 || ones == 16;
  };
  const std::vector<Row> rows = covering_array(problem);
  EXPECT_TRUE(contains(rows, {0, 7}, {1, 1}));
  const CoverageReport report = coverage(rows, problem);
  EXPECT_TRUE(report.complete());
  EXPECT_EQ(report.impossible.size(), 15U) << "the first factor's 1 with a 0 of any other";
}

TEST(Coverage, NamesWhatIsMissingImpossibleAndIllegal) {
  CoveringProblem problem;
  problem.factors = {{"tensor", 2}, {"sequence", 2}, {"tying", 2}};
  problem.legal = [](const Row& row) { return row[0] == 1 || row[1] == 0; };
  problem.pairwise = {{0, 1, 2}};
  const std::vector<Row> rows = {{1, 1, 0}, {1, 0, 1}, {0, 0, 1}, {0, 1, 0}};

  const CoverageReport report = coverage(rows, problem);

  EXPECT_EQ(report.tuples, 12);
  EXPECT_EQ(report.illegal_rows, 1);
  EXPECT_FALSE(report.complete());
  ASSERT_EQ(report.impossible.size(), 1U);
  EXPECT_EQ(describe(report.impossible[0], problem), "tensor=0, sequence=1");
  std::vector<std::string> missing;
  for (const FactorTuple& tuple : report.missing) missing.push_back(describe(tuple, problem));
  EXPECT_EQ(missing, (std::vector<std::string>{"tensor=0, tying=0", "sequence=0, tying=0", "sequence=1, tying=1"}));
  EXPECT_EQ(report.covered, 8);
}

TEST(Coverage, IsCompleteWithoutALegalRow) {
  CoveringProblem problem = uniform(3, 2);
  problem.legal = [](const Row&) { return false; };
  EXPECT_TRUE(covering_array(problem).empty());
  EXPECT_EQ(coverage({}, problem).impossible.size(), 12U);
}

TEST(CoveringArray, RefusesGroupsAndRowsThatDoNotFit) {
  CoveringProblem problem = uniform(3, 2);
  EXPECT_THROW((void)coverage({{0, 0}}, problem), ContractError);
  EXPECT_THROW((void)coverage({{0, 0, 2}}, problem), ContractError);
  problem.pairwise = {{0, 3}};
  EXPECT_THROW((void)covering_array(problem), ContractError);
  problem.pairwise = {{0, 1, 0}};
  EXPECT_THROW((void)covering_array(problem), ContractError);
  problem.pairwise = {{0, 1}};
  problem.factors[1].num_values = 0;
  EXPECT_THROW((void)covering_array(problem), ContractError);
}

}  // namespace
}  // namespace tandem

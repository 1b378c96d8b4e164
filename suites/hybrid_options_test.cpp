// SPDX-License-Identifier: Apache-2.0
#include "suites/hybrid_options.h"

#include <set>

#include <gtest/gtest.h>

#include "suites/hybrid_rows.h"

namespace tandem {
namespace {

void expect_covers(std::span<const std::string_view> digits, std::uint64_t seed) {
  const HybridOptions options;
  std::vector<Row> rows;
  for (const std::string_view row : digits) rows.push_back(row_of(row));
  CoveringProblem problem = options.problem();
  problem.seed = seed;

  const CoverageReport report = coverage(rows, problem);

  if (report.complete()) return;
  std::string better;
  for (const Row& row : covering_array(problem)) {
    better += '"';
    for (const int value : row) better += static_cast<char>('0' + value);
    better += "\", ";
  }
  FAIL() << report.missing.size() << " tuples are missing, " << report.illegal_rows
         << " rows are illegal; these cover: " << better;
}

TEST(HybridOptions, QuickRowsCoverPairsAndTriples) { expect_covers(kQuickRows, 4); }
TEST(HybridOptions, MoreRowsCoverPairsAndTriples) { expect_covers(kMoreRows, 2); }

// Every 997th row of the product; the number has no factor in common with those of values.
TEST(HybridOptions, WhatIsRememberedOfARowHoldsForAllThatItStandsFor) {
  const HybridOptions options;
  const CoveringProblem& problem = options.problem();
  std::int64_t product = 1;
  for (const CoveringFactor& factor : problem.factors) product *= factor.num_values;
  int legal = 0;
  for (std::int64_t index = 0; index < product; index += 997) {
    Row row;
    std::int64_t rest = index;
    for (const CoveringFactor& factor : problem.factors) {
      row.push_back(static_cast<int>(rest % factor.num_values));
      rest /= factor.num_values;
    }
    const bool expected = options.is_legal_without_memory(row);
    ASSERT_EQ(problem.legal(row), expected) << "row " << index;
    legal += expected ? 1 : 0;
  }
  EXPECT_GT(legal, 300);
}

TEST(HybridOptions, NamesAreDifferent) {
  const HybridOptions options;
  for (const auto rows : {std::span<const std::string_view>(kQuickRows), std::span<const std::string_view>(kMoreRows)}) {
    std::set<std::string> names;
    for (const auto& [name, variant] : options.named(rows)) names.insert(name);
    EXPECT_EQ(names.size(), rows.size());
  }
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tandem {

/// A few rows of option values in which every pair (and chosen triples) of values occurs. Faults that need two or three options
/// to meet show in such an array as surely as in the whole product, at a small part of its cost.

struct CoveringFactor {
  std::string name;
  int num_values = 1;  ///< at least 1; values are 0 .. num_values - 1
};

/// [factors] index of each factor's value.
using Row = std::vector<int>;

struct CoveringProblem {
  std::vector<CoveringFactor> factors;
  /// Whether a whole row may be used; empty: every row. Must answer the same for the same row, and is asked for many rows.
  std::function<bool(const Row&)> legal;
  /// Groups of factors (by index): every pair of factors of one group is covered, each with every combination of values.
  std::vector<std::vector<int>> pairwise;
  /// Groups of factors: every triple of factors of one group is covered.
  std::vector<std::vector<int>> triplewise;
  std::uint64_t seed = 1;  ///< of the search; the same problem and seed give the same rows
};

/// Two or three factors, in ascending order, with one value each.
struct FactorTuple {
  std::vector<int> factors;
  std::vector<int> values;
  friend bool operator==(const FactorTuple&, const FactorTuple&) = default;
};

/// "tensor=1, sequence_parallel=0"
[[nodiscard]] std::string describe(const FactorTuple& tuple, const CoveringProblem& problem);

struct CoverageReport {
  int tuples = 0;                       ///< demanded by the groups, each once
  int covered = 0;                      ///< of these, contained in a legal row of the array
  std::vector<FactorTuple> impossible;  ///< contained in no legal row at all
  std::vector<FactorTuple> missing;     ///< contained in some legal row, but in none of the array
  int illegal_rows = 0;                 ///< rows of the array that are refused; they cover nothing
  [[nodiscard]] bool complete() const noexcept { return missing.empty() && illegal_rows == 0; }
};

/// Legal rows that cover every demanded tuple which a legal row can contain. Greedy: each row starts from a row with a tuple that
/// is not covered yet and is improved value by value; at the end, rows that the others make needless are taken out. Small, not
/// minimal. Tuples that are rare among the legal rows are looked for in the whole product, which may have 2^26 rows at most.
///
/// Throws ContractError where a factor has no value, a group names an unknown factor or one twice, or the product is too large.
[[nodiscard]] std::vector<Row> covering_array(const CoveringProblem& problem);

/// What an array covers of a problem. Errors as above, and where a row does not fit the factors.
[[nodiscard]] CoverageReport coverage(const std::vector<Row>& rows, const CoveringProblem& problem);

}  // namespace tandem

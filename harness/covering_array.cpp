// SPDX-License-Identifier: Apache-2.0
#include "harness/covering_array.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/rng.h"

namespace tandem {
namespace {

constexpr std::int64_t kLargestProduct = std::int64_t{1} << 26;
constexpr int kRandomRows = 20000;  // tried before the whole product is searched
constexpr int kStartsPerRow = 12;
constexpr int kWholeSearches = 4;  // the smallest array is taken

// Two or three factors whose combinations of values are covered: values x, y, z of them are tuple
// first + x strides[0] + y strides[1] + z strides[2]. The third stride of a pair is 0. The search spends its time in this sum.
struct Interaction {
  std::vector<int> factors;
  std::size_t first = 0;
  std::array<std::size_t, 3> places{};
  std::array<std::size_t, 3> strides{};
};

void add_subsets(std::set<std::vector<int>>& subsets, std::vector<int> group, std::size_t size, const CoveringProblem& problem) {
  std::ranges::sort(group);
  for (std::size_t i = 0; i < group.size(); ++i) {
    TANDEM_CHECK(group[i] >= 0 && group[i] < static_cast<int>(problem.factors.size()),
                 fmt::format("a group of a covering array names factor {} of {}", group[i], problem.factors.size()));
    TANDEM_CHECK(i == 0 || group[i] != group[i - 1], fmt::format("a group of a covering array names factor {} twice", group[i]));
  }
  for (std::size_t a = 0; a < group.size(); ++a) {
    for (std::size_t b = a + 1; b < group.size(); ++b) {
      if (size == 2) subsets.insert({group[a], group[b]});
      for (std::size_t c = b + 1; size == 3 && c < group.size(); ++c) subsets.insert({group[a], group[b], group[c]});
    }
  }
}

// The tuples of a problem by number, and which of them legal rows can contain.
class Tuples {
 public:
  explicit Tuples(const CoveringProblem& problem) : problem_(problem) {
    for (const CoveringFactor& factor : problem.factors) {
      TANDEM_CHECK(factor.num_values >= 1, fmt::format("factor {} of a covering array has no value", factor.name));
    }
    std::set<std::vector<int>> subsets;
    for (const std::vector<int>& group : problem.pairwise) add_subsets(subsets, group, 2, problem);
    for (const std::vector<int>& group : problem.triplewise) add_subsets(subsets, group, 3, problem);
    for (const std::vector<int>& factors : subsets) {
      Interaction& added = interactions_.emplace_back(Interaction{factors, size_, {}, {}});
      std::size_t combinations = 1;
      for (std::size_t i = factors.size(); i-- > 0;) {
        added.places[i] = static_cast<std::size_t>(factors[i]);
        added.strides[i] = combinations;
        combinations *= static_cast<std::size_t>(num_values(added.places[i]));
      }
      size_ += combinations;
    }
  }

  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] bool legal(const Row& row) const { return !problem_.legal || problem_.legal(row); }
  [[nodiscard]] int num_values(std::size_t factor) const { return problem_.factors[factor].num_values; }

  // Calls visit(number) for each tuple that the row contains.
  template <class Visit>
  void each(const Row& row, Visit visit) const {
    for (const Interaction& interaction : interactions_) visit(number(row, interaction));
  }

  [[nodiscard]] std::size_t num_interactions() const { return interactions_.size(); }
  // The tuple of the i-th interaction that the row contains.
  [[nodiscard]] std::size_t in(const Row& row, std::size_t i) const { return number(row, interactions_[i]); }
  // First and last + 1 tuple of the i-th interaction.
  [[nodiscard]] std::pair<std::ptrdiff_t, std::ptrdiff_t> range(std::size_t i) const {
    const std::size_t last = i + 1 < interactions_.size() ? interactions_[i + 1].first : size_;
    return {static_cast<std::ptrdiff_t>(interactions_[i].first), static_cast<std::ptrdiff_t>(last)};
  }

  [[nodiscard]] FactorTuple at(std::size_t number) const {
    const auto after = std::ranges::upper_bound(interactions_, number, {}, &Interaction::first);
    const Interaction& interaction = *std::prev(after);
    FactorTuple tuple{interaction.factors, {}};
    std::size_t rest = number - interaction.first;
    for (std::size_t i = 0; i < tuple.factors.size(); ++i) {
      tuple.values.push_back(static_cast<int>(rest / interaction.strides[i]));
      rest %= interaction.strides[i];
    }
    return tuple;
  }

 private:
  static std::size_t number(const Row& row, const Interaction& interaction) {
    const auto term = [&](std::size_t i) {
      return static_cast<std::size_t>(row[interaction.places[i]]) * interaction.strides[i];
    };
    return interaction.first + term(0) + term(1) + term(2);
  }

  const CoveringProblem& problem_;
  std::vector<Interaction> interactions_;
  std::size_t size_ = 0;
};

Row random_row(const CoveringProblem& problem, CounterRng& random) {
  Row row;
  for (const CoveringFactor& factor : problem.factors) {
    row.push_back(static_cast<int>(random.next_below(static_cast<std::uint64_t>(factor.num_values))));
  }
  return row;
}

// For every tuple a legal row that contains it; empty where there is none. Common tuples are met at random, the rest is proven by
// going through the product.
class Witnesses {
 public:
  Witnesses(const CoveringProblem& problem, const Tuples& tuples) : tuples_(tuples), rows_(tuples.size()), left_(tuples.size()) {
    for (std::size_t i = 0; i < tuples.num_interactions(); ++i) open_.push_back(i);
    CounterRng random(problem.seed, "covering array witnesses");
    for (int i = 0; i < kRandomRows && left_ > 0; ++i) note(random_row(problem, random));
    forget_complete_interactions();
    if (left_ > 0) go_through_product(problem);
  }

  [[nodiscard]] const Row& of(std::size_t tuple) const { return rows_[tuple]; }
  [[nodiscard]] bool possible(std::size_t tuple) const { return !rows_[tuple].empty(); }

 private:
  void note(const Row& row) {
    const bool news = std::ranges::any_of(open_, [&](std::size_t i) { return rows_[tuples_.in(row, i)].empty(); });
    if (!news || !tuples_.legal(row)) return;
    tuples_.each(row, [&](std::size_t tuple) {
      if (!rows_[tuple].empty()) return;
      rows_[tuple] = row;
      --left_;
    });
  }

  // Of most interactions every tuple is met early; the product is far too large to look at them again.
  void forget_complete_interactions() {
    std::erase_if(open_, [&](std::size_t i) {
      const auto [first, last] = tuples_.range(i);
      return std::none_of(rows_.begin() + first, rows_.begin() + last, [](const Row& row) { return row.empty(); });
    });
  }

  void go_through_product(const CoveringProblem& problem) {
    std::int64_t product = 1;
    for (const CoveringFactor& factor : problem.factors) {
      product *= factor.num_values;
      TANDEM_CHECK(product <= kLargestProduct, "the product of a covering array's factors is too large to search");
    }
    Row row(problem.factors.size(), 0);
    for (std::int64_t i = 0; i < product && left_ > 0; ++i) {
      note(row);
      for (std::size_t factor = 0; factor < row.size() && ++row[factor] == problem.factors[factor].num_values; ++factor) {
        row[factor] = 0;
      }
    }
  }

  const Tuples& tuples_;
  std::vector<Row> rows_;
  std::vector<std::size_t> open_;  // interactions that may have a tuple without a row
  std::size_t left_;
};

// One greedy search for rows that cover all possible tuples.
class Search {
 public:
  Search(const CoveringProblem& problem, const Tuples& tuples, const Witnesses& witnesses, std::uint64_t attempt)
      : tuples_(tuples), witnesses_(witnesses), random_(problem.seed + attempt, "covering array search") {
    open_.resize(tuples.size());
    for (std::size_t tuple = 0; tuple < tuples.size(); ++tuple) open_[tuple] = witnesses.possible(tuple) ? 1 : 0;
  }

  std::vector<Row> run() {
    std::vector<Row> rows;
    for (std::vector<std::size_t> left = open_tuples(); !left.empty(); left = open_tuples()) {
      rows.push_back(best_row(left));
      tuples_.each(rows.back(), [&](std::size_t tuple) { open_[tuple] = 0; });
    }
    return rows;
  }

 private:
  [[nodiscard]] std::vector<std::size_t> open_tuples() const {
    std::vector<std::size_t> left;
    for (std::size_t tuple = 0; tuple < open_.size(); ++tuple) {
      if (open_[tuple] != 0) left.push_back(tuple);
    }
    return left;
  }

  [[nodiscard]] int gain(const Row& row) const {
    int news = 0;
    tuples_.each(row, [&](std::size_t tuple) { news += open_[tuple]; });
    return news;
  }

  Row best_row(const std::vector<std::size_t>& left) {
    Row best;
    int best_gain = 0;
    for (int start = 0; start < kStartsPerRow; ++start) {
      Row row = witnesses_.of(left[random_.next_below(left.size())]);
      scatter(row);
      const int found = improve(row);
      if (found <= best_gain) continue;
      best_gain = found;
      best = std::move(row);
    }
    return best;
  }

  // Witnesses are the same few rows: others that still have something new make different starts.
  void scatter(Row& row) {
    for (std::size_t step = 0; step < 2 * row.size(); ++step) {
      const std::size_t factor = random_.next_below(row.size());
      const int before = std::exchange(
          row[factor], static_cast<int>(random_.next_below(static_cast<std::uint64_t>(tuples_.num_values(factor)))));
      if (row[factor] != before && (gain(row) == 0 || !tuples_.legal(row))) row[factor] = before;
    }
  }

  // Changes single values, and pairs of values that only together are legal, for as long as the row covers more.
  int improve(Row& row) {
    int now = gain(row);
    for (bool better = true; better;) {
      better = false;
      for (std::size_t first = 0; first < row.size(); ++first) {
        for (std::size_t second = first; second < row.size(); ++second) better = improve_pair(row, first, second, now) || better;
      }
    }
    return now;
  }

  bool improve_pair(Row& row, std::size_t first, std::size_t second, int& now) {
    Row best = row;
    int best_gain = now;
    Row trial = row;
    for (int a = 0; a < tuples_.num_values(first); ++a) {
      trial[first] = a;
      for (int b = 0; b < tuples_.num_values(second); ++b) {
        trial[second] = b;
        const int found = gain(trial);
        if (found <= best_gain || !tuples_.legal(trial)) continue;
        best_gain = found;
        best = trial;
      }
    }
    const bool better = best_gain > now;
    row = std::move(best);
    now = best_gain;
    return better;
  }

  const Tuples& tuples_;
  const Witnesses& witnesses_;
  CounterRng random_;
  std::vector<std::uint8_t> open_;
};

// Takes out, from the last on, every row whose tuples are all in other rows too.
void prune(std::vector<Row>& rows, const Tuples& tuples) {
  std::vector<int> times(tuples.size(), 0);
  for (const Row& row : rows) tuples.each(row, [&](std::size_t tuple) { ++times[tuple]; });
  for (std::size_t i = rows.size(); i-- > 0;) {
    bool needed = false;
    tuples.each(rows[i], [&](std::size_t tuple) { needed = needed || times[tuple] == 1; });
    if (needed) continue;
    tuples.each(rows[i], [&](std::size_t tuple) { --times[tuple]; });
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace

std::string describe(const FactorTuple& tuple, const CoveringProblem& problem) {
  std::string text;
  for (std::size_t i = 0; i < tuple.factors.size(); ++i) {
    text += fmt::format("{}{}={}", i == 0 ? "" : ", ", problem.factors[static_cast<std::size_t>(tuple.factors[i])].name,
                        tuple.values[i]);
  }
  return text;
}

std::vector<Row> covering_array(const CoveringProblem& problem) {
  const Tuples tuples(problem);
  const Witnesses witnesses(problem, tuples);
  std::vector<Row> best;
  for (std::uint64_t attempt = 0; attempt < kWholeSearches; ++attempt) {
    std::vector<Row> rows = Search(problem, tuples, witnesses, attempt).run();
    prune(rows, tuples);
    if (attempt == 0 || rows.size() < best.size()) best = std::move(rows);
  }
  return best;
}

CoverageReport coverage(const std::vector<Row>& rows, const CoveringProblem& problem) {
  const Tuples tuples(problem);
  const Witnesses witnesses(problem, tuples);
  CoverageReport report;
  std::vector<std::uint8_t> covered(tuples.size(), 0);
  for (const Row& row : rows) {
    TANDEM_CHECK(row.size() == problem.factors.size(), "a row of a covering array has another number of factors");
    for (std::size_t factor = 0; factor < row.size(); ++factor) {
      TANDEM_CHECK(row[factor] >= 0 && row[factor] < tuples.num_values(factor),
                   fmt::format("a row of a covering array has value {} of factor {}", row[factor], problem.factors[factor].name));
    }
    if (!tuples.legal(row)) {
      ++report.illegal_rows;
      continue;
    }
    tuples.each(row, [&](std::size_t tuple) { covered[tuple] = 1; });
  }
  report.tuples = static_cast<int>(tuples.size());
  report.covered = static_cast<int>(std::count(covered.begin(), covered.end(), 1));
  for (std::size_t tuple = 0; tuple < tuples.size(); ++tuple) {
    if (covered[tuple] != 0) continue;
    (witnesses.possible(tuple) ? report.missing : report.impossible).push_back(tuples.at(tuple));
  }
  return report;
}

}  // namespace tandem

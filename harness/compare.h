// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/attribution.h"
#include "harness/result_file.h"
#include "harness/statistics.h"
#include "harness/text_table.h"

namespace tandem {

/// worse and better: slower and faster, more and fewer bytes, a verdict that broke and one that was fixed. few_samples: too few
/// for a statement of this case alone; it counts in that over all cases.
enum class Change : std::uint8_t { same, better, worse, too_noisy, not_comparable, few_samples };

/// One metric of one case in both files.
struct MetricComparison {
  std::string case_name;
  /// "verdict", "step_seconds", "peak_bytes", "bytes_on_wire"; "seconds_per_token_and_rank" between cases of other rank counts;
  /// empty: the case as a whole
  std::string metric;
  double a = 0, b = 0;  ///< medians; bytes; for the verdict error over bound. NaN where there is none
  Ratio ratio;          ///< b / a; for bytes without an interval (low = high = value)
  Change change = Change::same;
  std::string reason;                      ///< why it is not comparable, too noisy, or what broke
  double coverage = 0.95;                  ///< of the interval
  double effect = 0;                       ///< of times: Cliff's delta of the samples, -1 to 1; else NaN
  [[nodiscard]] std::string word() const;  ///< "slower", "more", "broken", "too noisy to tell", ...
};

struct Comparison {
  std::string name_a, name_b;
  double threshold = 0.05;
  std::vector<MetricComparison> rows;
  std::vector<std::string> notes;  ///< what differs between the two runs and may explain the rest
  /// Cases that passed in both and whose errors against the truth are known; and those of them whose errors, in every stage, are
  /// the same to the last digit: as good as the same bits.
  int numbers_compared = 0, numbers_identical = 0;
  std::string first_other_numbers;  ///< "data_parallel/...: gradients 1.2e-07, 1.3e-07"
  Attribution attribution;
  [[nodiscard]] int count(Change change) const;
  /// 1: something is worse; 3: nothing is worse, but something is too noisy to tell or not comparable, or nothing was compared;
  /// 0: every metric is the same or better.
  [[nodiscard]] int exit_status() const;
};

/// Of each side for a bootstrap interval; and of cases for one over all of them.
inline constexpr std::size_t kFewestSamples = 5;

struct CompareOptions {
  double threshold = 0.05;
  /// The two files are of two machines: backend and link may differ, and of plans how work is done (threads, overlap), not what.
  bool machines = false;
};

/// Compares the cases of both files by name.
///
/// Step times: ratio of medians r = B / A with its 95 % interval [low, high] from the raw samples, threshold t:
///   low > 1 + t  slower      high < 1 / (1 + t)  faster      both inside  same      else  too noisy to tell
/// With fewer than kFewestSamples on a side the interval is the exact one (statistics.h); where that covers less than 95 %, the
/// case says nothing by itself (few_samples). The row "all cases" has the geometric mean of the cases' ratios with its bootstrap
/// interval over cases, and decides for those.
/// A case that is in one file only is compared with one of the other that has another number of ranks and is otherwise the same
/// (name up to "ranksN", model): seconds per token and rank, whose inverse ratio is the scaling efficiency of B against A.
/// Bytes are exact: same within t, else more or less. A verdict that was pass and no longer is, is worse.
/// Not comparable: other model or plan, other link or backend (but see CompareOptions); a case that is in one file only, was
/// skipped in one, or passed in neither; a file made with a pitfall on. A case skipped in both is left out.
[[nodiscard]] Comparison compare(const ResultFile& a, const ResultFile& b, std::string name_a, std::string name_b,
                                 const CompareOptions& options);
[[nodiscard]] Comparison compare(const ResultFile& a, const ResultFile& b, std::string name_a, std::string name_b,
                                 double threshold = 0.05);
/// The row of one case's times, A's multiplied by `scale_a` and B's by `scale_b`: of unequal work, per token and rank.
[[nodiscard]] MetricComparison compare_times(const std::string& case_name, const std::string& metric,
                                             const std::vector<double>& a, const std::vector<double>& b, double scale_a,
                                             double scale_b, double threshold);
/// The row over all cases from those of single ones; of fewer than kFewestSamples one that is not comparable.
[[nodiscard]] MetricComparison compare_all_times(const std::vector<MetricComparison>& rows, double threshold);

/// Table, notes, and one line that says what the exit status means.
[[nodiscard]] std::string render(const Comparison& comparison, TableStyle style);
[[nodiscard]] std::string to_json(const Comparison& comparison);

/// Several files against the first one: each comparison, and a table of machines. exit status: 1 where one has 1, else 3 where
/// one has 3.
[[nodiscard]] int exit_status(const std::vector<Comparison>& comparisons);
[[nodiscard]] std::string render(const std::vector<Comparison>& comparisons, TableStyle style);
[[nodiscard]] std::string to_json(const std::vector<Comparison>& comparisons);

}  // namespace tandem

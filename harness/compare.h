// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/result_file.h"
#include "harness/statistics.h"
#include "harness/text_table.h"

namespace tandem {

/// worse and better: slower and faster, more and fewer bytes, a verdict that broke and one that was fixed.
enum class Change : std::uint8_t { same, better, worse, too_noisy, not_comparable };

/// One metric of one case in both files.
struct MetricComparison {
  std::string case_name;
  std::string metric;   ///< "verdict", "step_seconds", "peak_bytes", "bytes_on_wire"; empty: the case as a whole
  double a = 0, b = 0;  ///< medians; bytes; for the verdict error over bound. NaN where there is none
  Ratio ratio;          ///< b / a; for bytes without an interval (low = high = value)
  Change change = Change::same;
  std::string reason;                      ///< why it is not comparable, too noisy, or what broke
  [[nodiscard]] std::string word() const;  ///< "slower", "more", "broken", "too noisy to tell", ...
};

struct Comparison {
  std::string name_a, name_b;
  double threshold = 0.05;
  std::vector<MetricComparison> rows;
  std::vector<std::string> notes;  ///< what differs between the two runs and may explain the rest
  [[nodiscard]] int count(Change change) const;
  /// 1: something is worse; 3: nothing is worse, but something is too noisy to tell or not comparable, or nothing was compared;
  /// 0: every metric is the same or better.
  [[nodiscard]] int exit_status() const;
};

inline constexpr std::size_t kFewestSamples = 5;

/// Compares the cases of both files by name.
///
/// Step times: ratio of medians r = B / A with the 95 % bootstrap interval [low, high] from the raw samples, threshold t:
///   low > 1 + t  slower      high < 1 / (1 + t)  faster      both inside  same      else  too noisy to tell
/// Bytes are exact: same within t, else more or less. A verdict that was pass and no longer is, is worse.
/// Not comparable: other model, plan, link or backend; fewer than kFewestSamples samples; a case that is in one file only, was
/// skipped in one, or passed in neither; a file made with a pitfall on. A case skipped in both is left out.
[[nodiscard]] Comparison compare(const ResultFile& a, const ResultFile& b, std::string name_a, std::string name_b,
                                 double threshold = 0.05);

/// Table, notes, and one line that says what the exit status means.
[[nodiscard]] std::string render(const Comparison& comparison, TableStyle style);
[[nodiscard]] std::string to_json(const Comparison& comparison);

}  // namespace tandem

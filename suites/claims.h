// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "harness/case.h"

namespace tandem {

enum class ClaimVerdict : std::uint8_t { holds, holds_within_limits, imprecise, does_not_hold };
/// "holds", "holds within limits", "imprecise", "does not hold"
[[nodiscard]] std::string_view name(ClaimVerdict verdict);

inline constexpr double kNoFigure = std::numeric_limits<double>::quiet_NaN();

/// One figure of a claim: what the article says, what a formula says, and what was measured here by this run. kNoFigure: there is
/// none. The first figure of a claim is its own; the others are what the verdict needs beside it.
struct ClaimFigure {
  std::string key;   ///< by which conditions and reports name it: "extra_flops_full"
  std::string what;  ///< "extra FLOPs, full recomputation"
  double stated = kNoFigure, predicted = kNoFigure, measured = kNoFigure;
  std::string unit;  ///< "B", "s", "share" (printed in per cent), "x" (a ratio), or what is counted
};

/// What was found of a claim, without a verdict.
struct ClaimFindings {
  std::vector<ClaimFigure> figures;
  std::string not_measured = {};  ///< what would need other hardware; empty: nothing

  /// Throws ContractError where there is no such figure.
  [[nodiscard]] const ClaimFigure& figure(std::string_view key) const;
  [[nodiscard]] double predicted(std::string_view key) const { return figure(key).predicted; }
  [[nodiscard]] double measured(std::string_view key) const { return figure(key).measured; }
};

/// What must be so for a claim to hold. A figure that is not a number meets no condition.
struct ClaimCondition {
  enum class Of : std::uint8_t { predicted, measured };
  std::string figure;  ///< key
  Of of = Of::measured;
  Relation relation = Relation::at_most;  ///< at_most or at_least
  double limit = 0;
  ClaimVerdict otherwise = ClaimVerdict::does_not_hold;  ///< the verdict is the worst of all conditions that are not met
  std::string because;                                   ///< said where it is not met: the limit, or the right figure
};

struct ClaimResult {
  ClaimVerdict verdict = ClaimVerdict::holds;
  std::string reason;  ///< the numbers, then what each condition says that is not met
  std::vector<ClaimFigure> figures;
  std::string not_measured;  ///< what would need other hardware; empty: nothing
};

/// Sizes and numbers of trials; the conditions are the same.
enum class ClaimEffort : std::uint8_t { quick, usual };

/// A statement of the article "Engineering Challenges and Practices for Very Large-Scale LLM Training".
struct Claim {
  std::string id, section, stated;                       ///< "C03", "2.2", in our words
  std::string command;                                   ///< reproduces the figures in depth
  std::function<ClaimFindings(const RunContext&)> find;  ///< predicts and measures
  std::vector<ClaimCondition> conditions;                ///< all met: it holds
  std::function<std::string(const ClaimFindings&)> say;  ///< one or two sentences with the numbers
};

/// The verdict follows from figures and conditions alone: the worst of the conditions that are not met, all of which are named.
struct ClaimJudgement {
  ClaimVerdict verdict = ClaimVerdict::holds;
  std::vector<ClaimCondition> unmet;
};
/// Throws ContractError where a condition is about a figure that there is not.
[[nodiscard]] ClaimJudgement judge(const std::vector<ClaimCondition>& conditions, const ClaimFindings& findings);
[[nodiscard]] ClaimResult judge(const Claim& claim, const ClaimFindings& findings);
[[nodiscard]] inline ClaimResult evaluate(const Claim& claim, const RunContext& context) {
  return judge(claim, claim.find(context));
}

/// "12.5 %", "18.0 B", "1.23 x", "-": a figure with its unit.
[[nodiscard]] std::string say_figure(double value, std::string_view unit);

/// C01 to C21, in order.
[[nodiscard]] std::vector<Claim> all_claims(ClaimEffort effort = ClaimEffort::usual);

}  // namespace tandem

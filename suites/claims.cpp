// SPDX-License-Identifier: Apache-2.0
#include "suites/claims.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "harness/text_table.h"
#include "suites/claims_parts.h"

namespace tandem {

std::string_view name(ClaimVerdict verdict) {
  switch (verdict) {
    case ClaimVerdict::holds: return "holds";
    case ClaimVerdict::holds_within_limits: return "holds within limits";
    case ClaimVerdict::imprecise: return "imprecise";
    case ClaimVerdict::does_not_hold: return "does not hold";
  }
  return "does not hold";
}

const ClaimFigure& ClaimFindings::figure(std::string_view key) const {
  const auto found = std::find_if(figures.begin(), figures.end(), [&](const ClaimFigure& entry) { return entry.key == key; });
  TANDEM_CHECK(found != figures.end(), fmt::format("a claim has no figure {}", key));
  return *found;
}

ClaimJudgement judge(const std::vector<ClaimCondition>& conditions, const ClaimFindings& findings) {
  ClaimJudgement judgement;
  for (const ClaimCondition& condition : conditions) {
    const ClaimFigure& figure = findings.figure(condition.figure);
    const double value = condition.of == ClaimCondition::Of::measured ? figure.measured : figure.predicted;
    const bool met = condition.relation == Relation::at_least ? value >= condition.limit : value <= condition.limit;
    if (met) continue;
    judgement.verdict = std::max(judgement.verdict, condition.otherwise);
    judgement.unmet.push_back(condition);
  }
  return judgement;
}

ClaimResult judge(const Claim& claim, const ClaimFindings& findings) {
  const ClaimJudgement judgement = judge(claim.conditions, findings);
  ClaimResult result{judgement.verdict, claim.say(findings), findings.figures, findings.not_measured};
  for (const ClaimCondition& condition : judgement.unmet) result.reason += " " + condition.because;
  return result;
}

std::string say_figure(double value, std::string_view unit) {
  if (std::isnan(value)) return "-";
  if (unit == "share") return human_share(value);
  if (unit == "s") return human_seconds(value);
  if (unit == "B") return human_bytes(std::llround(value));
  const double size = std::abs(value);
  const std::string number = size >= 1e5                                 ? human_count(value)
                             : size >= 100 || value == std::round(value) ? fmt::format("{:.0f}", value)
                             : size >= 10                                ? fmt::format("{:.1f}", value)
                                                                         : fmt::format("{:.3g}", value);
  return fmt::format("{} {}", number, unit);
}

std::vector<Claim> all_claims(ClaimEffort effort) {
  std::vector<Claim> all;
  for (const auto make :
       {memory_claims, scale_claims, communication_claims, parallel_claims, precision_claims, reliability_claims, data_claims}) {
    for (Claim& claim : make(effort)) all.push_back(std::move(claim));
  }
  std::sort(all.begin(), all.end(), [](const Claim& a, const Claim& b) { return a.id < b.id; });
  return all;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "harness/agreement.h"

#include <algorithm>

#include <fmt/format.h>

namespace tandem {
namespace {

int gravity(Status status) {
  switch (status) {
    case Status::pass: return 0;
    case Status::skip: return 1;
    case Status::invalid: return 2;
    case Status::fail: break;
  }
  return 3;
}

}  // namespace

Opinion opinion_of(const CaseResult& result) { return {result.verdict.status, result.verdict.check, result.verdict.reason}; }

void take_worst(CaseResult& result, std::span<const Opinion> opinions) {
  const auto worst = std::ranges::max_element(opinions, {}, [](const Opinion& opinion) { return gravity(opinion.status); });
  if (worst == opinions.end()) return;
  const bool all_equal = std::ranges::all_of(opinions, [&](const Opinion& opinion) { return opinion.status == worst->status; });
  if (all_equal && result.verdict.status == worst->status) return;
  result.verdict.status = worst->status;
  result.verdict.check = worst->check;
  result.verdict.reason = fmt::format("process {}: {}", worst - opinions.begin(), worst->reason);
  if (worst->status != Status::pass) result.measurements.reset();
}

}  // namespace tandem

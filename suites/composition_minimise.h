// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "harness/runner.h"
#include "suites/composition.h"

namespace tandem {

/// What is wrong with a composition: which of its checks (suites/composition_checks.h) is red, which of the judge's findings it
/// is (Verdict::check: "gradients", "property rows", "exception"), and in which precision. A smaller composition with another
/// fault is no smaller form of this one; and what is beyond a bound in fp32 has another cause than what is in bf16, whose bound
/// is 2^15 times as wide.
struct CompositionFailure {
  std::string check;
  std::string finding;
  std::string precision;  ///< of a finding that bounds of rounding decide; empty where bits, counts or exceptions do
  std::string reason;     ///< one line, of this composition alone

  [[nodiscard]] bool same_as(const CompositionFailure& other) const {
    return check == other.check && finding == other.finding && precision == other.precision;
  }
};

/// The first red check, or nothing. `only`: of all checks this one alone is run. A case that is invalid is red as well. `results`
/// gets all that was judged; may be null.
[[nodiscard]] std::optional<CompositionFailure> first_failure(const Composition& composition, const std::string& name,
                                                              const RunnerOptions& options, const std::string& only = "",
                                                              std::vector<CaseResult>* results = nullptr);

struct Minimised {
  Composition composition;  ///< fails in the same way, and no single simplification of it does
  std::int64_t tried = 0;   ///< smaller compositions that were judged
  bool complete = true;     ///< false: stopped at `most_tried`
};

/// Greedy: of all simplifications (an option at its simplest value, a degree or a size smaller) the first after which
/// `fails_alike` still says yes is taken, until none is left. A simplification that makes the plan illegal takes along the
/// options that conflicts() names. `fails_alike` is asked only about compositions that are legal and decidable, about each once.
[[nodiscard]] Minimised minimise(const Composition& failing, const std::function<bool(const Composition&)>& fails_alike,
                                 std::int64_t most_tried = 400);

}  // namespace tandem

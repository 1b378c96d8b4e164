// SPDX-License-Identifier: Apache-2.0
#include "suites/golden.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "suites/golden_bounds.h"
#include "suites/golden_run.h"
#include "suites/pair.h"

namespace tandem {

bool GoldenOutcome::passed() const noexcept {
  return std::all_of(properties.begin(), properties.end(), [](const Property& property) { return property.holds(); });
}

const Property& GoldenOutcome::worst() const {
  TANDEM_CHECK(!properties.empty());
  const auto severity = [](const Property& p) {
    if (std::isnan(p.value) || (p.limit == 0 && !p.holds())) return HUGE_VAL;
    return p.limit == 0 ? 0.0 : p.value / p.limit;
  };
  return *std::max_element(properties.begin(), properties.end(),
                           [&](const Property& a, const Property& b) { return severity(a) < severity(b); });
}

GlobalBatch golden_batch(const GoldenSet& set) {
  return {set.micro_batches * set.micro_batch_size, static_cast<int>(set.micro_batches)};
}

GoldenOutcome run_golden_reference(const GoldenSet& set, const TrainingPlan& plan) {
  GoldenOutcome outcome{"reference " + plan.precision, golden_deviations(set, golden_reference_run(set, plan))};
  if (is_narrow(plan.numerics)) {
    limit_narrow_reference(set, plan, outcome.properties);
  } else {
    limit_wide(set, plan.numerics, outcome.properties);
  }
  return outcome;
}

GoldenOutcome run_golden_engine(const GoldenSet& set, const TrainingPlan& plan, const MachineChoice& machine,
                                const GoldenOutcome& reference) {
  GoldenOutcome outcome{fmt::format("engine {} {}", plan.precision, describe_layout(plan)),
                        golden_deviations(set, golden_engine_run(set, plan, machine))};
  if (is_narrow(plan.numerics)) {
    limit_narrow_engine(set, plan, reference.properties, outcome.properties);
  } else {
    limit_wide(set, plan.numerics, outcome.properties);
  }
  return outcome;
}

}  // namespace tandem

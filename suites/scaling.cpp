// SPDX-License-Identifier: Apache-2.0
// What a step costs at scale: predictions against closed forms, against this machine and against what is published.
// docs/techniques/scaling.md
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "suites/properties.h"
#include "suites/scaling_cases.h"
#include "suites/suites.h"

namespace tandem {

Case scaling_case(const std::string& name, const std::string& summary,
                  std::function<std::vector<Property>(const RunContext&)> properties) {
  return property_case("scaling", name, summary, std::move(properties));
}

Property relative_error(const std::string& name, double value, double expected, double limit, const std::string& derivation) {
  return {name,
          std::abs(value / expected - 1),
          Relation::at_most,
          limit,
          fmt::format("{:.6g} against {:.6g}: {}", value, expected, derivation),
          -1,
          ""};
}

void add_scaling_cases(CaseList& cases) {
  add_scaling_replay_cases(cases);
  add_scaling_model_cases(cases);
  add_scaling_simulator_cases(cases);
  add_scaling_measured_cases(cases);
  add_scaling_published_cases(cases);
  add_scaling_plan_cases(cases);
}

}  // namespace tandem

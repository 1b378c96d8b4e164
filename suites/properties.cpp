// SPDX-License-Identifier: Apache-2.0
#include "suites/properties.h"

#include <fmt/format.h>

#include "suites/pair.h"

namespace tandem {

Case property_case(const std::string& suite, const std::string& name, const std::string& summary, const GptConfig& model,
                   const TrainingPlan& plan) {
  Case result;
  result.suite = suite;
  result.name = fmt::format("{}/{}", suite, name);
  result.model = model;
  result.plan = plan;
  result.criterion = Criterion::convergence;
  result.summary = fmt::format("{}: {}", describe_layout(plan), summary);
  return result;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "suites/properties.h"

#include <utility>

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

Case property_case(const std::string& suite, const std::string& name, const std::string& summary,
                   std::function<std::vector<Property>(const RunContext&)> properties) {
  Case result;
  result.suite = suite;
  result.name = fmt::format("{}/{}", suite, name);
  result.summary = summary;
  result.criterion = Criterion::convergence;
  result.execute = [properties = std::move(properties)](const RunContext& context) {
    CaseEvidence evidence;
    evidence.properties = properties(context);
    return evidence;
  };
  return result;
}

}  // namespace tandem

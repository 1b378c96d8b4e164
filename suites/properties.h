// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/case.h"

namespace tandem {

/// "SUITE/NAME", judged by its properties, to be given its execute().
[[nodiscard]] Case property_case(const std::string& suite, const std::string& name, const std::string& summary,
                                 const GptConfig& model, const TrainingPlan& plan);

/// The same of nothing that has a layout, with the properties that execute() finds.
[[nodiscard]] Case property_case(const std::string& suite, const std::string& name, const std::string& summary,
                                 std::function<std::vector<Property>(const RunContext&)> properties);

/// An identity: `value` must be `expected`.
[[nodiscard]] inline Property exactly(const std::string& name, double value, double expected, const std::string& derivation) {
  return {name, value, Relation::equal, expected, derivation, -1, ""};
}

}  // namespace tandem

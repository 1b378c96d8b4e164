// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/case.h"

namespace tandem {

/// Parts of the suite; docs/techniques/scaling.md.
void add_scaling_replay_cases(CaseList& cases);     ///< step programs in time against closed forms and conservation laws
void add_scaling_model_cases(CaseList& cases);      ///< costs, memory, FLOPs and parameters against closed forms
void add_scaling_simulator_cases(CaseList& cases);  ///< simulate(): against replay(), what moves it, what it accounts for
void add_scaling_measured_cases(CaseList& cases);   ///< predicted against measured on shaped links
void add_scaling_published_cases(CaseList& cases);  ///< predicted against published
void add_scaling_plan_cases(CaseList& cases);       ///< the planner against layouts that were run

/// "scaling/NAME", judged by its properties.
[[nodiscard]] Case scaling_case(const std::string& name, const std::string& summary,
                                std::function<std::vector<Property>(const RunContext&)> properties);

/// |value / expected - 1| at most `limit`, with both numbers in the derivation.
[[nodiscard]] Property relative_error(const std::string& name, double value, double expected, double limit,
                                      const std::string& derivation);

/// Rounding of sums of some thousands of doubles, and nothing else.
inline constexpr double kExact = 1e-9;

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// Mixed precision with loss scaling: 16-bit storage, fp32 masters, a scale that keeps small gradients alive, and fp8 operands.
// docs/techniques/loss_scaling.md
#include <fmt/format.h>

#include "suites/loss_scaling_cases.h"
#include "suites/suites.h"

namespace tandem {

Case loss_scaling_case(const std::string& name, const std::string& summary, Criterion criterion, const ParallelVariant& shown,
                       bool quick) {
  Case result;
  const PairInputs inputs = inputs_of(shown, {});
  result.suite = "loss_scaling";
  result.name = "loss_scaling/" + name;
  result.summary = fmt::format("{}, {}: {}", inputs.plan.precision, describe_layout(inputs.plan), summary);
  result.model = inputs.model;
  result.plan = inputs.plan;
  result.criterion = criterion;
  result.quick = quick;
  return result;
}

void add_loss_scaling_cases(CaseList& cases, const SuiteOptions& options) {
  add_precision_cases(cases);
  add_scale_invariance_cases(cases);
  add_overflow_cases(cases);
  add_scaler_table_cases(cases, options.more_golden_folder / "pieces");
  add_mixed_resume_cases(cases);
  add_underflow_cases(cases);
  add_fp8_cases(cases);
}

}  // namespace tandem

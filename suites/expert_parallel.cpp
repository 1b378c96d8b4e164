// SPDX-License-Identifier: Apache-2.0
// Expert parallelism: each token goes to its best one or two of several MLPs, which are dealt to data ranks.
// docs/techniques/expert_parallel.md
#include <fmt/format.h>

#include "reference/expert_parallel.h"
#include "reference/training.h"
#include "suites/benefits.h"
#include "suites/expert_ledger.h"
#include "suites/parallel_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "expert_parallel";

reference::NamedTensors<double> lockstep_gradients(const PairInputs& inputs, const Batch& batch) {
  const auto parameters = reference::initial_parameters<double>(inputs.model, inputs.initialization, inputs.seed);
  std::optional<reference::DropoutStep> dropout;
  if (inputs.model.has_dropout()) dropout = reference::DropoutStep{inputs.seed, 0};
  const reference::ExpertParallelLayout layout{inputs.plan.parallel.data, inputs.plan.parallel.expert,
                                               inputs.plan.batch.micro_batches};
  return reference::expert_parallel_gradients<double>(inputs.model, parameters, batch, layout, dropout).gradients;
}

std::vector<Property> properties(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> all = expert_ledger(inputs, run);
  all.push_back(lockstep_agrees(inputs, lockstep_gradients));
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::activation));
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::gradient));
  all.push_back(state_as_predicted(inputs, run.measured));
  return all;
}

}  // namespace

void add_expert_parallel_cases(CaseList& cases) {
  const auto add = [&](const std::string& name, const ParallelVariant& variant, bool quick = true) {
    cases.push_back(parallel_case(kSuite, name, variant, properties, quick));
  };
  for (const int choices : {1, 2}) {
    const auto named = [&](const std::string& layout) { return fmt::format("{}/top{}/fp32", layout, choices); };
    add(named("ranks1"), {.experts = 4, .choices = choices, .micro_batches = 2});
    add(named("data2/expert2"), {.degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = choices, .micro_batches = 2});
    add(named("data4/expert2"), {.degrees = {.data = 4, .expert = 2}, .experts = 4, .choices = choices, .micro_batches = 3});
    add(named("data3/expert3"), {.degrees = {.data = 3, .expert = 3}, .experts = 3, .choices = choices, .tied = false});
    add(named("data4/expert4/packed"),
        {.degrees = {.data = 4, .expert = 4}, .experts = 8, .choices = choices, .row_shape = RowShape::packed}, choices == 2);
  }
  add("data4/expert4/rows3/top2/fp32", {.degrees = {.data = 4, .expert = 4}, .experts = 4, .choices = 2, .rows = 3});
}

}  // namespace tandem

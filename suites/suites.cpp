// SPDX-License-Identifier: Apache-2.0
#include "suites/suites.h"

#include <optional>
#include <string>
#include <utility>

#include "harness/registry.h"
#include "suites/machine_of.h"

namespace tandem {

namespace {

// What a case takes time for, it takes on the CPU: its bounds and tables are of that.
void leave_times_to_the_cpu(CaseList& cases) {
  for (Case& entry : cases) {
    if (!entry.timed) continue;
    entry.unavailable = [before = std::move(entry.unavailable)](const RunContext& context) {
      std::optional<std::string> reason = measures_the_cpu(context);
      return !reason && before ? before(context) : reason;
    };
  }
}

// NCCL adds in the order of its own algorithms and cannot be held up: cases that ask for another algorithm, or an adversary.
void leave_to_messages(CaseList& cases) {
  for (Case& entry : cases) {
    const bool adversary = entry.name.find("/adversary/") != std::string::npos;
    if (!adversary && entry.suite != "collectives") continue;
    entry.unavailable = [before = std::move(entry.unavailable)](const RunContext& context) -> std::optional<std::string> {
      if (context.world.transport == "nccl") return "asks for an algorithm or an adversary that NCCL does not have";
      return before ? before(context) : std::nullopt;
    };
  }
}

}  // namespace

CaseList all_cases(const SuiteOptions& options) {
  CaseList cases;
  add_harness_cases(cases);
  add_collectives_cases(cases);
  add_data_parallel_cases(cases);
  add_tensor_parallel_cases(cases);
  add_pipeline_parallel_cases(cases);
  add_context_parallel_cases(cases);
  add_expert_parallel_cases(cases);
  add_hybrid_parallel_cases(cases);
  add_recomputation_cases(cases);
  add_zero_cases(cases);
  add_overlap_cases(cases);
  add_compression_cases(cases);
  add_checkpoint_cases(cases);
  add_recovery_cases(cases);
  add_anomaly_cases(cases);
  add_data_pipeline_cases(cases);
  add_loss_scaling_cases(cases, options);
  add_adversary_cases(cases);
  add_scaling_cases(cases);
  add_training_cases(cases, options);
  leave_times_to_the_cpu(cases);
  leave_to_messages(cases);
  check_registry(cases);
  return cases;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "cli/train_options.h"
#include "optimized/monitoring/step_metrics.h"
#include "optimized/recovery/supervisor.h"

namespace tandem {

/// `tandem train --supervise`: runs `tandem train` as workers until they finish. Returns an ExitStatus. Throws InputError.
[[nodiscard]] int supervise_run(const TrainArguments& arguments, const std::atomic<bool>& stop);

/// Puts this Slurm job back into its queue; says so where that fails. Nothing outside of Slurm.
void requeue_job();

/// What a supervisor says about its run when it is over.
struct SupervisedRun {
  SupervisorReport report;
  std::vector<Incident> incidents;  ///< of the log: the workers', too
  std::string output;
  std::int64_t newest_step = 0, steps = 0;  ///< of the checkpoints; that the run was to have
  std::int64_t checkpoint_every_steps = 0;
};
/// Useful and redone time by the steps themselves, where they were written down; else it stays what beats have shown.
void count_steps(const std::vector<StepMetrics>& steps, SupervisorReport& report);
void print_supervised(const SupervisedRun& run);
[[nodiscard]] std::string supervised_json(const SupervisedRun& run);

}  // namespace tandem

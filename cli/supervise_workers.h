// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/train_options.h"
#include "optimized/monitoring/step_metrics.h"
#include "optimized/recovery/process_launcher.h"
#include "optimized/recovery/run_guardian.h"

namespace tandem {

/// The workers of a supervised run: `tandem train` with the run's own arguments, behind a launcher where ranks are processes.
class RunLauncher final : public Launcher {
 public:
  /// `plan`: as resolved for the run. `heartbeat`: HOST:PORT of the supervisor. `goes_on`: there is something to resume. Borrows
  /// arguments and plan.
  RunLauncher(const TrainArguments& arguments, const TrainPlan& plan, std::string heartbeat, bool goes_on);

  [[nodiscard]] std::unique_ptr<Worker> start(const Attempt& attempt) override;
  /// Those of the last attempt alone: a shrunk plan has no place for earlier ones.
  [[nodiscard]] std::vector<int> lost_ranks() override;
  [[nodiscard]] std::optional<std::int64_t> newest_step() override;
  [[nodiscard]] std::optional<std::int64_t> steps_done() override;

  /// Why nothing could be started, in one line; empty: it could.
  [[nodiscard]] const std::string& refusal() const noexcept { return refusal_; }

 private:
  [[nodiscard]] std::vector<std::string> command(const Attempt& attempt) const;
  void add_run_arguments(std::vector<std::string>& words) const;

  const TrainArguments& arguments_;
  const TrainPlan& plan_;
  std::string heartbeat_;
  ProcessLauncher processes_;
  bool goes_on_;
  std::size_t known_lost_ = 0;
  std::optional<std::size_t> steps_before_;  // in the metrics file before the present attempt
  std::string refusal_;
};

/// Ends the workers of this supervisor where it is killed. To be made before anything that it must not share. Throws IoError.
[[nodiscard]] std::unique_ptr<RunGuardian> make_guardian(const TrainArguments& arguments);
/// NAME=VALUE in the environment of all processes of the run with this folder.
[[nodiscard]] std::string run_mark(const std::string& output);
/// Where the workers of a supervised run write a line for each step.
[[nodiscard]] std::string metrics_file(const TrainArguments& arguments);
/// Steps that a metrics file has: 0 where there is none; nothing where it is there and cannot be read.
[[nodiscard]] std::optional<std::size_t> count_steps_in(const std::string& file);
/// Of a metrics file, the steps behind the first `count` of them, in the order in which they were written, whatever the clock
/// did; none where it cannot be read, or could not be when they were counted.
[[nodiscard]] std::vector<StepMetrics> steps_behind(const std::string& file, std::optional<std::size_t> count);
/// Newest step that the workers would go on from, over all tiers; nothing: the beginning.
[[nodiscard]] std::optional<std::int64_t> newest_step_of(const TrainPlan& plan);
/// The same without memory, where it is beyond that step.
[[nodiscard]] std::optional<std::int64_t> newest_saved_step_of(const TrainPlan& plan, std::int64_t beyond = -1);
/// Ranks that faults have taken for good, in all attempts.
[[nodiscard]] std::vector<int> lost_ranks_of(const TrainPlan& plan);
/// --launcher: the workers may be on other machines.
[[nodiscard]] bool has_own_launcher(const TrainArguments& arguments);
/// Throws InputError where workers that are processes have nothing to start them.
void require_launcher(const TrainArguments& arguments);

}  // namespace tandem

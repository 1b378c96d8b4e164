// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optimized/training/trainer.h"
#include "reference/anomaly.h"
#include "suites/checkpoint_run.h"
#include "suites/properties.h"

namespace tandem {

/// What a watched run is tried on: the smallest model whose loss falls so smoothly that a garbage batch stands out.
struct WatchedVariant {
  ParallelDegrees degrees = {};
  int zero_stage = 0;
  std::string precision = "fp32";
  std::int64_t steps = 36;
  AnomalyAction action = AnomalyAction::rollback;
  bool retry = true;
};

/// Training with faults under the eyes of the guard.
struct WatchedScript {
  RunConfig config;
  std::shared_ptr<const BatchSource> data;
  std::vector<Fault> faults = {};
  std::filesystem::path folder = {};                  ///< of checkpoints
  std::optional<std::filesystem::path> resume = {};   ///< step folder
  std::shared_ptr<FaultInjector> injector = nullptr;  ///< of an attempt before; null: a new one for `faults`
  std::int64_t stop_after = 0;                        ///< steps done when the run is told to stop, as by a signal; 0: never
  bool timed = false;                                 ///< with a timeline: what takes longer than it did is looked for as well
};

/// Threads, a checkpoint every 5 steps that 4 steps confirm, a look at the state every 4, no evaluation but at the end.
[[nodiscard]] WatchedScript watched_script(const WatchedVariant& variant, const RunContext& context,
                                           const std::filesystem::path& folder);

[[nodiscard]] std::shared_ptr<FaultInjector> make_injector(const WatchedScript& script);

/// Throws what train() throws.
[[nodiscard]] TrainReport run_watched(const WatchedScript& script, const RunContext& context);

/// The engine alone, in a plain loop over the batches that a story ends with: no guard, no trainer, no list of batches. What
/// the story skips is skipped there, what it clips is clipped to the median of the norms of the window before.
[[nodiscard]] CheckpointRun told_run(const WatchedScript& script, const reference::PolicyOutcome& story,
                                     const RunContext& context);

/// The same, remembered: stories that come to the same end are told once. For scripts that differ in faults and folder alone.
class Teller {
 public:
  explicit Teller(const RunContext& context) : context_(context) {}
  [[nodiscard]] const CheckpointRun& tell(const WatchedScript& script, const reference::PolicyOutcome& story);

 private:
  const RunContext& context_;
  std::map<std::vector<std::int64_t>, CheckpointRun> told_;  // by PolicyOutcome::trained
};

/// What the policy of the script's configuration makes of `anomalies`.
[[nodiscard]] reference::PolicyOutcome story_of(const WatchedScript& script,
                                                const std::vector<reference::ScriptedAnomaly>& anomalies);

/// All fields and tensors of the last checkpoint below script.folder, after `steps` steps, against the end of `told`.
[[nodiscard]] Property equal_to_told(const std::string& label, const WatchedScript& script, const CheckpointRun& told);

/// Steps that differ in anything from those of the told run, from the report's first on.
[[nodiscard]] Property same_steps(const std::string& label, const TrainReport& report, const CheckpointRun& told);

/// Batches that the run leaves out for good, and how often it went back, as the story says. Where the story has none of either,
/// both are zero.
void add_course(const std::string& label, const TrainReport& report, const reference::PolicyOutcome& story,
                std::vector<Property>& properties);

/// A case of properties, to be given its execute().
[[nodiscard]] Case anomaly_case(const std::string& name, const std::string& summary, const WatchedVariant& variant);

}  // namespace tandem

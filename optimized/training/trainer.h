// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/batch_source.h"
#include "core/config.h"
#include "core/memory_ledger.h"
#include "core/timeline.h"
#include "core/world_settings.h"
#include "kernels/kernels.h"
#include "optimized/anomaly/guard.h"
#include "optimized/checkpoint/checkpointer.h"
#include "optimized/data_pipeline/prefetcher.h"
#include "optimized/engine/engine.h"
#include "optimized/monitoring/step_metrics.h"
#include "optimized/recovery/fault_injector.h"
#include "optimized/recovery/memory_tier.h"

namespace tandem {

struct TrainOptions {
  RunConfig config;
  const BatchSource* data = nullptr;            ///< borrowed
  std::string data_name;                        ///< kept in checkpoints
  std::filesystem::path output;                 ///< folder of checkpoints; empty: none are written
  std::shared_ptr<ObjectStore> store = {};      ///< where they are copied to; null: nowhere
  std::optional<std::filesystem::path> resume;  ///< step folder to continue from
  const std::atomic<bool>* stop = nullptr;      ///< set by a signal: the step under way is finished, then the run is saved
  bool poison = false;                          ///< fill fresh memory with NaN
  bool record_timeline = true;
  std::size_t kept_spans = 200'000;  ///< of each rank, about 30 MB: the last ones; 0: all
  WorldSettings world;
  std::string backend = "cpu";  ///< MachineChoice
  int device = 0;
  PitfallSet pitfalls;
  FileOperations* checkpoint_files = nullptr;  ///< borrowed; null: the system's
  /// false: a checkpoint of other data (BatchSource::identity()) is refused.
  bool data_may_change = false;
  /// Called on rank 0 after each step and each evaluation, and for each of TrainReport::checkpoint_problems at once.
  std::function<void(std::int64_t step, const StepResult&, double step_seconds)> on_step;
  std::function<void(std::int64_t step, double validation_loss)> on_evaluation;
  std::function<void(const std::string& problem)> on_checkpoint_problem;
  // What follows is for runs that are watched (docs/techniques/recovery.md, anomaly.md).
  std::uint64_t attempt = 0;                                ///< of the run, counting restarts
  ProgressBoard* board = nullptr;                           ///< borrowed: where the ranks say what they are doing
  FaultInjector* faults = nullptr;                          ///< borrowed
  std::optional<MemoryTierPlace> memory;                    ///< copies of the state every config.memory_every_steps
  std::set<std::int64_t> skipped_batches;                   ///< left out from the start, beside those of the run's ledger
  std::function<void(const AnomalyIncident&)> on_incident;  ///< on rank 0, as they happen
  /// On rank 0, after each step, with the spans of this step; shares of its time are left to who has the means (split_time).
  std::function<void(const StepMetrics&, const std::vector<Span>&)> on_metrics;
};

struct TrainReport {
  std::int64_t first_step = 0;
  std::vector<StepResult> steps;     ///< element i is step first_step + i; of what was rolled back, the last time
  std::vector<double> step_seconds;  ///< of the slowest rank, end of one step to end of the next
  double wall_seconds = 0;           ///< all steps, one clock, without evaluation and checkpoints
  std::vector<std::pair<std::int64_t, double>> validation_losses;  ///< (steps done, loss)
  bool interrupted = false;
  std::filesystem::path checkpoint;               ///< the last one written; empty where none was
  std::vector<std::string> checkpoint_problems;   ///< one line each; training went on, nothing was lost but that checkpoint
  bool last_checkpoint_failed = false;            ///< the last of them was not written, or not copied to the store
  std::vector<CheckpointTimes> checkpoint_times;  ///< of rank 0
  PrefetchStatistics loading;                     ///< of this process
  std::vector<std::vector<Span>> spans_by_rank;
  std::vector<MemoryLedger> ledgers;       ///< by rank
  std::vector<MemoryLedger> host_ledgers;  ///< by rank: what the plan keeps in host memory
  KernelsInfo kernels;
  std::vector<AnomalyIncident> incidents;
  bool gave_up = false;                    ///< the last incident ended the run
  double guard_seconds = 0;                ///< of rank 0, in the monitors, waiting for others included
  std::int64_t guard_bytes = 0;            ///< of state that they have read there
  std::set<std::int64_t> skipped_batches;  ///< by the end
};

/// Trains on the plan's ranks from step 0, or from where `resume` ended, to config.steps. Where ranks are processes, each of them
/// calls this, and the report of every process has the spans and ledgers of all ranks; the rest is with rank 0, as the files are.
/// Throws InputError for a plan, a model or tokens that do not fit; what a rank throws.
[[nodiscard]] TrainReport train(const TrainOptions& options);

}  // namespace tandem

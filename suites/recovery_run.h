// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "optimized/recovery/supervisor.h"
#include "optimized/training/trainer.h"
#include "suites/pair.h"

namespace tandem {

/// A supervised run whose workers are threads of this process: the real supervisor, detector, trainer and injector; only the
/// death of a process is an exception, and beats come from the board instead of a socket.
struct RecoveryScript {
  PairInputs inputs;                ///< `steps`: where the run ends
  std::vector<std::string> faults;  ///< as the command line takes them
  std::int64_t checkpoint_every_steps = 3;
  std::int64_t checkpoints_kept = 0;
  bool checkpoint_async = false;        ///< false: what a fault leaves does not depend on the disk
  bool durable = false;                 ///< true: files are synced, as where the power may fail; here only exceptions strike
  std::int64_t memory_every_steps = 0;  ///< 0: no memory tier
  int ranks_per_node = 0;               ///< of the memory tier
  bool shrink = false;
  int max_restarts = 10;
  DetectorOptions detector = {};  ///< ranks and pitfalls are filled in
  /// Called before each attempt but the first, when nothing runs: what else is lost.
  std::function<void(std::uint64_t attempt, const std::filesystem::path& memory)> between = {};
  /// Called where the supervisor ends a worker: true where something beside the scripted hangs held it up, and was let go.
  std::function<bool()> at_kill = {};
};

struct RecoveryAttempt {
  std::int64_t first_step = 0;
  bool from_memory = false, from_disk = false;
  int ranks = 0;
  std::int64_t rows = 0;  ///< of its global batch
};

/// A step as the rank-0 worker of an attempt finished it; steps that a failure undid are here twice.
struct DoneStep {
  std::uint64_t attempt = 0;
  std::int64_t step = 0;
  StepResult result;
};

struct RecoveryRun {
  SupervisorReport report;
  std::vector<RecoveryAttempt> attempts;
  std::vector<DoneStep> done;                    ///< in order
  std::vector<std::string> checkpoint_problems;  ///< of all attempts
  std::filesystem::path last;                    ///< step folder of the end; empty: there is none
};

/// Runs below `folder`: checkpoints in folder/checkpoints, the memory tier in folder/memory. Where the supervisor is asked to
/// stop by a fault (preempt), it is started again, as a scheduler would.
[[nodiscard]] RecoveryRun run_supervised(const RecoveryScript& script, const RunContext& context,
                                         const std::filesystem::path& folder);

/// The same run without faults, supervisor and memory tier.
[[nodiscard]] RecoveryRun run_undisturbed(const RecoveryScript& script, const RunContext& context,
                                          const std::filesystem::path& folder);

/// The state at the end, field by field and bit by bit, and each step whenever it was done, are those of the undisturbed run.
[[nodiscard]] std::vector<Property> same_as_undisturbed(const RecoveryRun& undisturbed, const RecoveryRun& run);

/// Where a supervised run's restarts begin.
struct ExpectedFailures {
  std::vector<std::int64_t> during;         ///< element i: step (from 0) under way when attempt i fails
  std::vector<std::int64_t> unusable = {};  ///< element i: newest checkpoints on disk that are of no use then
  bool memory_survives = true;
};

/// The run ended well, steps were done in the order that reference::execute() says, and the supervisor's lost steps are its.
[[nodiscard]] std::vector<Property> follows_ledger(const RecoveryScript& script, const ExpectedFailures& failures,
                                                   const RecoveryRun& run);

/// Incidents of this kind, of this rank (-1: any) and phase (empty: any).
[[nodiscard]] double count_incidents(const RecoveryRun& run, const std::string& kind, int rank = -1,
                                     const std::string& phase = "");

}  // namespace tandem

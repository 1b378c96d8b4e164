// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/anomaly_config.h"
#include "core/batch.h"
#include "core/config.h"
#include "core/io/file_operations.h"
#include "core/pitfall.h"
#include "core/timeline.h"
#include "optimized/anomaly/finding.h"
#include "optimized/anomaly/ledger.h"
#include "optimized/engine/engine.h"
#include "optimized/engine/update_gate.h"

namespace tandem {

struct AnomalyGuardOptions {
  RunConfig config;
  std::filesystem::path
      folder;                   ///< of the run's checkpoints: ledger and bundles are kept there; empty: nowhere, and no roll back
  bool starts_anew = false;     ///< no step was done before: what the folder's ledger says is of another run
  std::int64_t first_step = 0;  ///< that this attempt begins with
  std::string data;             ///< as the command line named it, for bundles
  std::string data_identity;
  FileOperations* files = nullptr;  ///< borrowed; null: system_files()
  PitfallSet pitfalls;
  /// The global batch of that index, for the hash in bundles; called by the first rank. Empty: bundles have none.
  std::function<Batch(std::int64_t batch)> read_batch = {};
};

/// What happened, for people and for the incident log.
struct AnomalyIncident {
  std::vector<AnomalyFinding> findings;  ///< of one step, the first monitor first
  AnomalyDecision decision = AnomalyDecision::go_on;
  std::int64_t step = 0;    ///< from 0
  std::int64_t batch = -1;  ///< that the step trained on
  bool retried = false;     ///< the step had been computed twice when this was decided
  bool repaired = false;    ///< and was as it should be the second time: training goes on as if nothing had been
  bool unsaved = false;     ///< the state was to become a checkpoint, and does not; said of each
  std::optional<std::int64_t> rolled_back_to;  ///< steps done
  std::optional<std::int64_t> skipped_batch;
  std::filesystem::path bundle;                ///< folder that replays it; empty where none was written
  std::string problem;                         ///< why ledger or bundle could not be written; empty: nothing was refused
  [[nodiscard]] std::string describe() const;  ///< one line
};

/// Watches one rank's run and decides, together with the guards of the other ranks, what is done about what it sees. All member
/// functions but the first group are collective; what they return is the same on all ranks. No rank throws alone: a finding is a
/// value that is agreed on first.
///
///   begin_step -> train_step [see_activation*, before_update] -> after_step -> (before_save -> saved)
///
/// Cost: one sum of a few doubles a step; all else every config.anomaly.sample_every_steps (docs/techniques/anomaly.md).
class AnomalyGuard {
 public:
  /// Reads the ledger: the first rank alone, for all. `engine` is borrowed.
  AnomalyGuard(AnomalyGuardOptions options, Engine& engine);
  ~AnomalyGuard();
  AnomalyGuard(const AnomalyGuard&) = delete;
  AnomalyGuard& operator=(const AnomalyGuard&) = delete;

  // Of this rank alone.
  void begin_step(std::int64_t step, std::int64_t batch);
  /// Output of block `layer`; looked at in sampled steps only.
  void see_activation(int layer, TensorView values);
  [[nodiscard]] const AnomalyLedger& ledger() const noexcept;
  [[nodiscard]] const std::vector<AnomalyIncident>& incidents() const noexcept;  ///< the same on all ranks
  /// Seconds of this rank in the guard so far, waiting for others included; and how many bytes of state it has read.
  [[nodiscard]] double seconds() const noexcept;
  [[nodiscard]] std::int64_t bytes_looked_at() const noexcept;

  /// The engine's gate. Never roll_back: where that is due, the update is skipped and after_step() says so.
  [[nodiscard]] UpdateDecision before_update(const UpdateSigns& signs);
  /// `spans`: of this step; may be empty. retry: of before_update(); go_on, roll_back or give_up otherwise.
  [[nodiscard]] AnomalyDecision after_step(const StepResult& result, double step_seconds, const std::vector<Span>& spans);
  /// Looks at the whole state: what is not finite or differs between replicas must not become a checkpoint. go_on: save.
  /// skip_step: do not, but train on (action report). roll_back, give_up: as of after_step().
  [[nodiscard]] AnomalyDecision before_save();
  /// Whether a copy of the state, as it is between two steps, is worth going back to: finite, and the same in all replicas. Looks
  /// where the last step has not; what is wrong is left to the next look, or to before_save(), to say.
  [[nodiscard]] bool vouches_for_state();
  /// A checkpoint of `steps_done` steps was begun; it becomes healthy when later steps have confirmed it.
  void saved(std::int64_t steps_done);

  /// Where roll_back goes: the newest healthy checkpoint; while there is none, what this attempt began with (options.first_step:
  /// 0 is the beginning). Steps done.
  [[nodiscard]] std::int64_t rollback_step() const noexcept;
  /// The state is that of rollback_step() again; the ledger, with the batch that is now skipped, has been written. Windows keep
  /// what belongs to the steps before.
  void rolled_back();

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// Takes the checkpoints that are newer than `step` out of sight, so that no restart picks what a rollback has left: their
/// folders are renamed to suspect-step-N (an older one of that name goes), of which kKeptSuspects of the highest steps stay.
/// Durable when it returns. Of rank 0.
inline constexpr std::size_t kKeptSuspects = 3;
void set_aside_checkpoints_after(const std::filesystem::path& folder, std::int64_t step, FileOperations& files);

}  // namespace tandem

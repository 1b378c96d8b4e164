// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/anomaly_config.h"
#include "reference/training.h"

namespace tandem::reference {

/// What makes a value of a series suspicious. Where fewer than `least` values are known, none is.
struct OutlierRule {
  std::int64_t window = 64;  ///< accepted values before it that a value is compared with
  std::int64_t least = 8;
  double threshold = 12;
  double relative_floor = 0;  ///< of the spread, in units of |median|
};

/// The middle of the sorted values; of an even number the mean of the two in the middle. Throws ContractError for none.
[[nodiscard]] double median_of(std::vector<double> values);

/// z(x) = (x - m) / max(1.4826 median |x_i - m|, relative_floor |m|), m = median of the x_i; infinite for an x that is not finite
/// and, in the direction of x - m, where the spread is zero.
[[nodiscard]] double robust_z(const std::vector<double>& values, double x, double relative_floor);

/// Indices of the values that are suspicious: not finite, or z at least `threshold` against the last `window` of those before
/// that were not suspicious themselves.
[[nodiscard]] std::vector<std::size_t> suspicious_steps(const std::vector<double>& series, const OutlierRule& rule);

/// The step-th batch, both from 0, of those that are not in `skipped`, by counting.
[[nodiscard]] std::int64_t batch_of(std::int64_t step, const std::set<std::int64_t>& skipped);

/// The copies that are not as more than half of them are; nothing where no such half exists.
[[nodiscard]] std::optional<std::vector<int>> odd_copies(const std::vector<std::uint64_t>& hashes);

/// What happened to a run, one after the other.
struct RunEvent {
  enum class Kind : std::uint8_t {
    step,         ///< step `number` (from 0) was done without a finding
    finding,      ///< step `number` was done, or left out, with one
    save,         ///< a checkpoint of `number` steps
    rolled_back,  ///< to the checkpoint of `number` steps; those of more are gone
  } kind = Kind::step;
  std::int64_t number = 0;
};

/// Checkpoints that a whole history shows to be healthy: at some time after one was saved, `confirm_steps` steps in a row were
/// done without a finding. Those that a rollback took away are left out.
[[nodiscard]] std::set<std::int64_t> healthy_checkpoints(const std::vector<RunEvent>& history, std::int64_t confirm_steps);

/// What disturbs a run that is only told, not computed.
struct ScriptedAnomaly {
  enum class Cause : std::uint8_t {
    machine,  ///< the computations of step `at`, the first `strikes` of them
    data,     ///< whatever is computed of batch `at`
    state,    ///< the state that step `at` leaves: it differs between replicas, or is not finite; once
  } cause = Cause::machine;
  std::int64_t at = 0;
  std::int64_t strikes = 1;
  bool finite = true;  ///< the gradient is
};

struct PolicyRun {
  AnomalyConfig policy;
  std::int64_t steps = 1;
  std::int64_t checkpoint_every_steps = 0;  ///< 0: none
  std::set<std::int64_t> skipped;           ///< batches known to be bad from the start
  std::vector<ScriptedAnomaly> anomalies;
};

/// One computation of a step, and what became of it.
struct Computation {
  std::int64_t step = 0, batch = 0;
  enum class Fate : std::uint8_t { applied, clipped, skipped, retried, rolled_back, gave_up } fate = Fate::applied;
  friend bool operator==(const Computation&, const Computation&) = default;
};

struct PolicyOutcome {
  std::vector<Computation> computations;  ///< in their order
  /// [steps] batch whose update each step has in the end; -1: none
  std::vector<std::int64_t> trained;
  std::set<std::int64_t> skipped;
  std::map<std::int64_t, std::int64_t> rollbacks;  ///< to each checkpoint, how often
  std::set<std::int64_t> healthy;
  bool gave_up = false;
};

/// What a run does that follows the policy of core/anomaly_config.h to the letter:
///
///   a suspicious computation is made once more, if `retry`, and forgotten if that one is not; else
///     report: the update is made;  skip: it is left out;  clip: it is made clipped, or left out where it is not finite;
///     rollback: on with the newest healthy checkpoint (or the beginning) and without the batch, for good; given up where that
///     checkpoint was the aim `max_rollbacks` times before
///   a state that is wrong is left behind the same way whatever the action is, but for report; no batch is to blame for it
///
/// A computation that was repaired is no finding.
[[nodiscard]] PolicyOutcome follow_policy(const PolicyRun& run);

/// The run that knew of its bad batches from the start: step s trains on run.batch(batch_of(s, skipped)).
[[nodiscard]] TrainingRun without_batches(TrainingRun run, const std::set<std::int64_t>& skipped);

}  // namespace tandem::reference

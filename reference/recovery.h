// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/heartbeat.h"
#include "reference/loss_scaling.h"
#include "reference/training.h"

/// Runs that fail and go on, by definition: what must be noticed, what is done again, what it costs, and what must come out.
namespace tandem::reference {

// ---- what must be noticed

/// A heartbeat and when it arrived.
struct HeardBeat {
  double seconds = 0;
  Heartbeat beat{};
};

struct StallLimits {
  double silent_seconds = 3.5;  ///< silence beyond it is death
  double fresh_seconds = 1.5;   ///< who has been silent for longer may be dying: nobody knows what it waits for
  std::array<double, kRunPhases> stall_seconds{};  ///< longest time without progress in each phase; 0: for ever
  /// Where it is positive, the limit of `train` is at least so many times the longest time for which beats of a rank in this
  /// phase have shown the same, apart from times in which something was reported of any rank.
  double patience = 0;
};

enum class StallKind : std::uint8_t { dead, hung };

struct Stall {
  int rank = 0;
  StallKind kind = StallKind::dead;
  double begin_seconds = 0;  ///< last beat heard (dead), last sign of progress (hung)
  RunPhase phase = RunPhase::start;
  double due_seconds = 0;  ///< from when on it must be known
  friend bool operator==(const Stall&, const Stall&) = default;
};

struct StallList {
  std::vector<Stall> stalls;  ///< by due_seconds, then by rank
  /// How near the trace comes to saying something else: the smallest distance of a silence, and of a stall, from its limit. A
  /// detector that looks from time to time may decide either way below the time between two looks.
  double silence_margin_seconds = 0, stall_margin_seconds = 0;
};

/// All that must be reported of a complete trace (sorted by time) of `ranks` ranks, whose attempt lasts over [begin, end).
///
///   silence   from a beat to the rank's next one or the end; longer than silent_seconds: dead. From the begin to the first beat
///   it
///             may last as long as `start`, where that is longer
///   stall     from the first beat, or one that shows another progress, step or phase than the one before it, to the next such
///   beat
///             or the end; longer than the limit of the phase that the rank is in: hung. Before the run's first step `train` may
///             last as long as `start`, where that is longer
///
/// It is due when its limit passes. Not reported is a rank that is dead by then, and one whose last beat before it says
/// `waiting`: another is to blame. But where every rank of the run waits, none has been silent for long, and all stall for longer
/// than they may, all are to blame from then on. A rank that has finished is let go. Each interval is reported once, whatever
/// follows.
[[nodiscard]] StallList stalls(const std::vector<HeardBeat>& trace, int ranks, double begin_seconds, double end_seconds,
                               const StallLimits& limits);

struct StragglerRule {
  double ratio = 1.5;  ///< of the rank's median and the median of the others' medians
  double share = 0.2;  ///< of the step, that the difference of these two is beyond
  int steps = 8;       ///< that the medians are over, the last ones
};

/// Ranks that are stragglers at the end of `work_seconds` [ranks][steps], each rank's own work without waiting for others.
/// `step_seconds` [steps]: of the slowest. Nobody before `rule.steps` steps.
[[nodiscard]] std::vector<int> stragglers(const std::vector<std::vector<double>>& work_seconds,
                                          const std::vector<double>& step_seconds, const StragglerRule& rule);

// ---- what is done again

/// A place where the state is kept.
struct RestartTier {
  std::int64_t every_steps = 1;
  bool outlives_failure = true;  ///< false: what it has is gone with the workers
  /// Element i: how many of its newest copies are of no use after failure i (broken off, damaged, never written).
  std::vector<std::int64_t> unusable = {};
};

struct FailureScript {
  std::int64_t steps = 0;            ///< of the run
  std::vector<RestartTier> tiers;    ///< saved after every every_steps steps; none: every restart begins anew
  std::vector<std::int64_t> during;  ///< element i: the step (from 0) that is under way when attempt i fails
};

struct ExecutedStep {
  std::uint64_t attempt = 0;
  std::int64_t step = 0;
  bool counts = true;  ///< false: it was lost, and a later attempt does it again
  friend bool operator==(const ExecutedStep&, const ExecutedStep&) = default;
};

struct ExecutionLedger {
  std::vector<ExecutedStep> steps;   ///< completed ones, in order
  std::vector<std::int64_t> begins;  ///< [attempts] first step of each
  std::int64_t lost_steps = 0;
};

/// The order in which the steps of a run are done: an attempt begins at the newest step that a tier still has, or at 0, and ends
/// when step during[attempt] is under way. A step under way is neither completed nor lost. A failure before the attempt's first
/// step is one during it.
[[nodiscard]] ExecutionLedger execute(const FailureScript& script);

// ---- what it costs

struct RunCosts {
  double step_seconds = 1;
  double save_seconds = 0;     ///< that training stands still for one checkpoint
  double restart_seconds = 0;  ///< from a failure to the begin of the next attempt's first step
  std::int64_t every_steps = 1;
  std::int64_t steps = 0;
};

struct TimeLedger {
  double wall_seconds = 0;
  double useful_seconds = 0;  ///< steps x step_seconds
  double redone_seconds = 0;  ///< of completed steps that were lost
  double broken_seconds = 0;  ///< of steps and saves that a failure broke off
  double save_seconds = 0;    ///< of completed ones
  double down_seconds = 0;    ///< of restarts
  std::int64_t lost_steps = 0;
  int failures = 0;
  [[nodiscard]] double goodput() const { return useful_seconds / wall_seconds; }
};

/// A run whose failures come at these seconds (ascending) since its begin; those beyond its end do not happen, and one during a
/// restart begins the restart anew. A checkpoint counts when it is complete. The last step is followed by no save.
[[nodiscard]] TimeLedger account(const RunCosts& costs, const std::vector<double>& failure_seconds);

// ---- who learns from what

struct DealtSample {
  std::int64_t step = 0;
  int rank = 0;
  int micro_batch = 0;
  std::int64_t place = 0;  ///< in the order of all samples, epochs one behind the other: step * rows + row
  friend bool operator==(const DealtSample&, const DealtSample&) = default;
};

/// Rows of a step stay whatever the ranks are: place p belongs to step p / rows. They are dealt to the ranks of the step, then to
/// their micro-batches, in contiguous parts whose sizes differ by at most one, larger ones first.
[[nodiscard]] std::vector<DealtSample> deal(std::int64_t rows, const std::vector<int>& ranks_of_step,
                                            const std::vector<int>& micro_batches_of_step);

/// The fewest micro-batches by which no rank of `ranks` has more than `most_rows` rows at once.
[[nodiscard]] int fewest_micro_batches(std::int64_t rows, int ranks, std::int64_t most_rows);

// ---- what must come out: a cold restart by hand

/// All that the plain training loop goes on from. Copying it is a checkpoint, going on with the copy a restart.
template <class Real>
struct RunState {
  std::int64_t next_step = 0;
  NamedTensors<Real> parameters;
  OptimizerState<Real> optimizer;
  LossScaler scaler;
};

template <class Real>
[[nodiscard]] RunState<Real> initial_state(const TrainingRun& run);

/// Runs the steps [state.next_step, until) of `run` and returns their losses. fp8 has a history of its own and is refused.
template <class Real>
std::vector<double> go_on(const TrainingRun& run, RunState<Real>& state, std::int64_t until);

}  // namespace tandem::reference

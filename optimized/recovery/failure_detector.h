// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/heartbeat.h"
#include "core/pitfall.h"

namespace tandem {

/// dead  nothing is heard of it            hung  it is heard of, and gets nothing done
/// slow  its own work takes much longer than that of the others, step after step (a straggler)
enum class RankState : std::uint8_t { alive, dead, hung, slow };
[[nodiscard]] std::string_view name(RankState state);

struct DetectorOptions {
  int ranks = 1;
  double beat_seconds = 1;  ///< between two heartbeats of a rank
  /// Silence that is death: 3 beats missed, and half of one for their way. A rank that has not been heard of at all in its
  /// attempt (programs take their time to start) has as long as it may stall in `start`; one that has finished may be silent.
  double silent_beats = 3.5;
  /// Longest time without progress in each phase; 0: for ever. train is at least `silent_beats` beats, and `patience` times the
  /// longest gap between two signs of progress that the run has shown in this phase and survived without being told. Until an
  /// attempt has done a first step, train may take as long as start: what is made once in a process is part of it.
  std::array<double, kRunPhases> stall_seconds = {120, 300, 60, 0, 120, 120, 0};
  double patience = 10;
  /// A straggler: over `straggler_steps` steps, the median of its own work is beyond this many times the median of the other
  /// ranks' medians, and the difference is beyond `straggler_share` of the step. It is told when that has held for half as many
  /// steps more, and its mean stands out by two thirds of that, too: beats see steps coarsely, and ranks at work scatter. Where a
  /// beat sees several steps, they count as one of their mean.
  double straggler_ratio = 1.5;
  double straggler_share = 0.2;
  int straggler_steps = 8;
  PitfallSet pitfalls = {};
};

/// A rank has changed its state.
struct RankEvent {
  RankState state = RankState::alive;  ///< alive: it was dead, hung or slow before, and is no longer
  int rank = 0;
  std::int64_t step = 0;  ///< steps done, as last heard
  RunPhase phase = RunPhase::start;
  double detected_after_seconds = 0;  ///< since it was last heard of (dead), got something done (hung), or began to be slow
  double value = 0, limit = 0;        ///< seconds; slow: its work over the others'
  /// One line; steps are printed from 1: "rank 1 hangs in train at step 15: nothing done for 3.6 s (limit 3.5 s)".
  [[nodiscard]] std::string describe() const;
};

/// Tells dead from hung from slow, by heartbeats and a clock that it is given: no threads, no clock of its own, so that a
/// simulated hour takes a millisecond. A hang is blamed on ranks that do not wait for another; where all wait (a deadlock), on
/// all. Each event is told once, and again when the rank has been alive in between.
///
/// Its time stands still while nobody listens: of a pause of more than a beat between two calls of check() (the machine was
/// asleep, or the supervisor was not given a processor) only a quarter of a beat counts as silence of others.
class FailureDetector {
 public:
  /// Throws ContractError where an option is impossible.
  explicit FailureDetector(const DetectorOptions& options);

  /// A new attempt begins: everything is forgotten but what the run has shown of its pace. Ranks count as heard of now.
  void begin_attempt(std::uint64_t attempt, int ranks, std::int64_t now_ns);
  /// Beats of other attempts, of ranks that do not exist, and those that newer ones have overtaken are ignored.
  void hear(const Heartbeat& beat, std::int64_t now_ns);
  /// What has changed, by rank. Call it at least twice a beat, after hear() with all that has arrived.
  [[nodiscard]] std::vector<RankEvent> check(std::int64_t now_ns);

  /// As last told.
  [[nodiscard]] RankState state(int rank) const;
  /// The most steps that any rank has done in this attempt; nothing before the first beat.
  [[nodiscard]] std::optional<std::int64_t> steps_done() const;
  /// Of the phase, as it stands now; infinite: for ever.
  [[nodiscard]] double stall_limit_seconds(RunPhase phase) const;

 private:
  /// One or more steps that two beats enclose, per step.
  struct Work {
    std::int64_t steps = 0;
    double busy_seconds = 0, wall_seconds = 0;
    std::int64_t begin_ns = 0;
    std::array<int, kRunPhases> beats{};  ///< that were at work, by phase
  };
  /// Of one step.
  struct Typical {
    double median_seconds = 0, mean_seconds = 0;
  };
  /// `heard` times are wall time, `listened` times those of the clock that stands still while nobody listens.
  struct Rank {
    bool is_heard = false;
    Heartbeat last;
    std::int64_t heard_ns = 0, heard_listened_ns = 0;
    std::int64_t done_ns = 0, done_listened_ns = 0;  ///< first beat that showed the latest progress
    bool gap_is_fault = false;                       ///< since then some rank was dead or hung: says nothing about the pace
    bool gap_outlasts_first_step = false;            ///< it was beyond the usual limit when the run's first step ended
    RankState told = RankState::alive;
    std::array<bool, 4> was_told{};  ///< by state
    std::deque<Work> works;
    Work open;  ///< since the last step that was seen
    std::int64_t open_busy_ns = 0, open_step = 0;
    bool is_open = false, has_new_work = false;
    int slow_for = 0;  ///< windows in a row
    std::int64_t slow_since_ns = 0;
    bool is_slow = false;
    double slowness = 1;
    RunPhase slow_phase = RunPhase::train;
  };

  [[nodiscard]] std::int64_t listened_at(std::int64_t now_ns) const;
  [[nodiscard]] double stall_limit_of(const Rank& rank) const;
  void end_first_step(std::int64_t listened_ns);
  void note_progress(Rank& rank, const Heartbeat& beat, std::int64_t now_ns, std::int64_t listened_ns);
  void note_work(Rank& rank, const Heartbeat& beat, std::int64_t now_ns) const;
  void judge_work();
  [[nodiscard]] double seconds_of(const Work& work) const;
  [[nodiscard]] std::optional<Typical> typical_work(const Rank& rank) const;
  void judge_rank(Rank& rank, const Typical& own, const Typical& others);
  void find_slow_phase(Rank& rank, const Typical& others) const;
  [[nodiscard]] bool is_dead(const Rank& rank) const;
  [[nodiscard]] double silence_limit_seconds(const Rank& rank) const;
  [[nodiscard]] bool is_stalled(const Rank& rank) const;
  [[nodiscard]] bool all_wait() const;
  [[nodiscard]] RankEvent event(int rank, RankState now, std::int64_t now_ns) const;

  DetectorOptions options_;
  std::uint64_t attempt_ = 0;
  std::int64_t checked_ns_ = 0, listened_ns_ = 0;
  bool has_pace_ = false;
  double longest_gap_seconds_ = 0;  ///< in train
  std::vector<Rank> ranks_;
};

}  // namespace tandem

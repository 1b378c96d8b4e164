// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "core/heartbeat.h"

namespace tandem {

/// What became of a run's time, by the beats of its attempts.
///
///   wall = useful + redone + down + rest
///
/// down    from each detection to the first step that the next attempt has done, that step included; of several failures before
///         such a step, from the first
/// redone  steps that an earlier attempt had done already
/// useful  steps that none had done. What ranks do between steps (data, evaluation, checkpoints) is their time, too
/// rest    start and end of the run, and what passed between the last step of an attempt and the detection of its failure
///
/// Beats see steps coarsely: the time of an attempt's steps is that between the first and the last beat that showed a new one,
/// and each of them has the same share of it.
class RunAccounting {
 public:
  /// `from`: where the attempt is expected to go on. Without: where its first beat says.
  void begin_attempt(std::uint64_t attempt, std::optional<std::int64_t> from, std::int64_t now_ns);
  /// True: the attempt has done its first step with this beat.
  bool hear(const Heartbeat& beat, std::int64_t now_ns);
  /// The attempt has done so many steps, some since its last beat.
  void learn(std::int64_t steps);
  void end_attempt();
  void failed(std::int64_t detected_ns);
  /// Time that is down until now is down.
  void finish(std::int64_t now_ns);

  /// Steps done, of the present or last attempt; before its first beat, where it goes on.
  [[nodiscard]] std::int64_t steps() const { return steps_; }
  /// The attempt has done a step that none had done before.
  [[nodiscard]] bool has_new_step() const { return steps_ > most_before_; }
  /// Steps done that the failures before this attempt have cost: since the last attempt that has done a step.
  [[nodiscard]] std::int64_t lost_steps() const { return lost_steps_; }
  [[nodiscard]] std::int64_t last_beat_ns() const { return last_beat_ns_; }

  [[nodiscard]] double useful_seconds() const { return useful_seconds_; }
  [[nodiscard]] double redone_seconds() const { return redone_seconds_; }
  [[nodiscard]] double down_seconds() const { return down_seconds_; }

 private:
  struct Mark {
    std::int64_t step = 0, ns = 0;
  };
  std::uint64_t attempt_ = 0;
  std::optional<std::int64_t> from_;
  std::int64_t steps_ = 0, most_before_ = 0, lost_steps_ = 0, last_beat_ns_ = 0;
  bool has_first_step_ = false;
  std::optional<Mark> counted_from_;
  Mark counted_to_;
  std::optional<std::int64_t> down_since_ns_;
  double useful_seconds_ = 0, redone_seconds_ = 0, down_seconds_ = 0;
};

}  // namespace tandem

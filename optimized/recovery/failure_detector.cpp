// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/failure_detector.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr double kNanoseconds = 1e9;

double seconds(std::int64_t ns) { return static_cast<double>(ns) / kNanoseconds; }
std::string text(double value_seconds) {
  return value_seconds < 10 ? fmt::format("{:.2g} s", value_seconds) : fmt::format("{:.0f} s", value_seconds);
}
std::size_t index_of(RunPhase phase) { return static_cast<std::size_t>(phase); }

}  // namespace

std::string_view name(RankState state) {
  switch (state) {
    case RankState::alive: return "alive";
    case RankState::dead: return "dead";
    case RankState::hung: return "hung";
    case RankState::slow: return "slow";
  }
  return "?";
}

std::string RankEvent::describe() const {
  const std::string place = fmt::format("in {} at step {}", name(phase), step + 1);
  switch (state) {
    case RankState::alive: return fmt::format("rank {} is well again {}", rank, place);
    case RankState::dead:
      return fmt::format("rank {} is dead: not heard of for {} (limit {}), last {}", rank, text(value), text(limit), place);
    case RankState::hung:
      return fmt::format("rank {} hangs {}: nothing done for {} (limit {})", rank, place, text(value), text(limit));
    case RankState::slow:
      return fmt::format("rank {} is slow {}: its own work takes {:.2f} times that of the others (limit {:.2f})", rank, place,
                         value, limit);
  }
  return {};
}

FailureDetector::FailureDetector(const DetectorOptions& options) : options_(options) {
  TANDEM_CHECK(options_.beat_seconds > 0 && options_.silent_beats > 0 && options_.straggler_steps > 0,
               fmt::format("a beat of {} s, silence of {} beats, {} steps", options_.beat_seconds, options_.silent_beats,
                           options_.straggler_steps));
  begin_attempt(0, options_.ranks, 0);
}

void FailureDetector::begin_attempt(std::uint64_t attempt, int ranks, std::int64_t now_ns) {
  TANDEM_CHECK(ranks > 0, fmt::format("{} ranks", ranks));
  attempt_ = attempt;
  checked_ns_ = now_ns;
  listened_ns_ = 0;
  has_pace_ = false;  // what is made, compiled and connected once in a process is part of its first step
  Rank fresh;
  fresh.heard_ns = fresh.done_ns = now_ns;
  ranks_.assign(static_cast<std::size_t>(ranks), fresh);
}

std::int64_t FailureDetector::listened_at(std::int64_t now_ns) const {
  const auto beat_ns = static_cast<std::int64_t>(options_.beat_seconds * kNanoseconds);
  const std::int64_t passed_ns = std::max<std::int64_t>(0, now_ns - checked_ns_);
  return listened_ns_ + (passed_ns <= beat_ns ? passed_ns : beat_ns / 4);
}

void FailureDetector::hear(const Heartbeat& beat, std::int64_t now_ns) {
  if (beat.attempt != attempt_ || beat.rank < 0 || beat.rank >= static_cast<int>(ranks_.size())) return;
  if (index_of(beat.phase) >= kRunPhases) return;
  Rank& rank = ranks_[static_cast<std::size_t>(beat.rank)];
  if (rank.is_heard && beat.sequence < rank.last.sequence) return;
  const std::int64_t listened_ns = listened_at(now_ns);
  note_progress(rank, beat, now_ns, listened_ns);
  note_work(rank, beat, now_ns);
  rank.is_heard = true;
  rank.last = beat;
  rank.heard_ns = now_ns;
  rank.heard_listened_ns = listened_ns;
}

void FailureDetector::note_progress(Rank& rank, const Heartbeat& beat, std::int64_t now_ns, std::int64_t listened_ns) {
  const Heartbeat& last = rank.last;
  if (rank.is_heard && beat.progress == last.progress && beat.step == last.step && beat.phase == last.phase) return;
  const bool was_training = rank.is_heard && last.phase == RunPhase::train;
  // Work is counted when a step ends: a beat that shows some comes after the first one, however few beats there were.
  if ((was_training && beat.step > last.step) || beat.busy_ns > 0) end_first_step(listened_ns);
  // From the first to the last beat that showed the same: surely a gap, where the time until the next beat may not be one.
  if (was_training && !rank.gap_is_fault) {
    longest_gap_seconds_ = std::max(longest_gap_seconds_, seconds(rank.heard_listened_ns - rank.done_listened_ns));
  }
  rank.gap_is_fault = rank.gap_outlasts_first_step = false;
  rank.done_ns = now_ns;
  rank.done_listened_ns = listened_ns;
}

// One rank's beat tells of it; that of another, which shows the same, may still be on its way.
void FailureDetector::end_first_step(std::int64_t listened_ns) {
  if (has_pace_) return;
  has_pace_ = true;
  const double limit = stall_limit_seconds(RunPhase::train);
  for (Rank& rank : ranks_) rank.gap_outlasts_first_step = seconds(listened_ns - rank.done_listened_ns) > limit;
}

double FailureDetector::stall_limit_of(const Rank& rank) const {
  const double limit = stall_limit_seconds(rank.last.phase);
  const bool is_first = rank.gap_outlasts_first_step && rank.last.phase == RunPhase::train;
  return is_first ? std::max(limit, stall_limit_seconds(RunPhase::start)) : limit;
}

double FailureDetector::stall_limit_seconds(RunPhase phase) const {
  constexpr double kForEver = std::numeric_limits<double>::infinity();
  if (options_.pitfalls.on(Pitfall::one_limit_for_all_phases)) phase = RunPhase::train;
  const double given = options_.stall_seconds[index_of(phase)];
  if (phase != RunPhase::train) return given > 0 ? given : kForEver;
  const double at_least = std::max(given, options_.silent_beats * options_.beat_seconds);
  const double first =
      has_pace_ || options_.pitfalls.on(Pitfall::one_limit_for_all_phases) ? 0 : stall_limit_seconds(RunPhase::start);
  return std::max({at_least, options_.patience * longest_gap_seconds_, first});
}

double FailureDetector::silence_limit_seconds(const Rank& rank) const {
  const double silent = options_.silent_beats * options_.beat_seconds;
  return rank.is_heard ? silent : std::max(silent, stall_limit_seconds(RunPhase::start));
}

bool FailureDetector::is_dead(const Rank& rank) const {
  if (rank.is_heard && rank.last.phase == RunPhase::finished) return false;
  return seconds(listened_ns_ - rank.heard_listened_ns) > silence_limit_seconds(rank);
}

// Not one that has been silent for more than a beat and a half: it may be dying, which is something else.
bool FailureDetector::is_stalled(const Rank& rank) const {
  const bool is_fresh = seconds(listened_ns_ - rank.heard_listened_ns) < 1.5 * options_.beat_seconds;
  if (!rank.is_heard || (!is_fresh && rank.told != RankState::hung)) return false;
  return seconds(listened_ns_ - rank.done_listened_ns) > stall_limit_of(rank);
}

// Nobody is left that the others could be waiting for: all that have not finished wait, for longer than they may.
bool FailureDetector::all_wait() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    if (rank.is_heard && rank.last.phase == RunPhase::finished) return true;
    return is_stalled(rank) && rank.last.waiting;
  });
}

RankEvent FailureDetector::event(int index, RankState now, std::int64_t now_ns) const {
  const Rank& rank = ranks_[static_cast<std::size_t>(index)];
  RankEvent event = {.state = now, .rank = index, .step = rank.last.step, .phase = rank.last.phase};
  if (now == RankState::dead) {
    event.detected_after_seconds = seconds(now_ns - rank.heard_ns);
    event.value = seconds(listened_ns_ - rank.heard_listened_ns);
    event.limit = silence_limit_seconds(rank);
  } else if (now == RankState::hung) {
    event.detected_after_seconds = seconds(now_ns - rank.done_ns);
    event.value = seconds(listened_ns_ - rank.done_listened_ns);
    event.limit = stall_limit_of(rank);
  } else if (now == RankState::slow) {
    event.detected_after_seconds = seconds(now_ns - rank.slow_since_ns);
    event.value = rank.slowness;
    event.limit = options_.straggler_ratio;
    event.phase = rank.slow_phase;
  }
  return event;
}

std::vector<RankEvent> FailureDetector::check(std::int64_t now_ns) {
  listened_ns_ = listened_at(now_ns);
  checked_ns_ = std::max(checked_ns_, now_ns);
  judge_work();
  const bool blames_waiting = options_.pitfalls.on(Pitfall::waiting_rank_taken_for_hung) || all_wait();
  const bool forgets = !options_.pitfalls.on(Pitfall::reported_rank_never_cleared);
  std::vector<RankEvent> events;
  bool has_fault = false;
  for (std::size_t index = 0; index < ranks_.size(); ++index) {
    Rank& rank = ranks_[index];
    RankState now = rank.is_slow ? RankState::slow : RankState::alive;
    if (is_dead(rank)) {
      now = RankState::dead;
    } else if (is_stalled(rank) && (blames_waiting || !rank.last.waiting || rank.told == RankState::hung)) {
      now = RankState::hung;
    }
    has_fault = has_fault || now == RankState::dead || now == RankState::hung;
    if (now == rank.told) continue;
    const bool is_new = forgets || now == RankState::alive || !rank.was_told[static_cast<std::size_t>(now)];
    if (is_new) events.push_back(event(static_cast<int>(index), now, now_ns));
    rank.was_told[static_cast<std::size_t>(now)] = true;
    rank.told = now;
  }
  if (has_fault) {
    for (Rank& rank : ranks_) rank.gap_is_fault = true;
  }
  return events;
}

RankState FailureDetector::state(int rank) const {
  TANDEM_CHECK(rank >= 0 && rank < static_cast<int>(ranks_.size()), fmt::format("rank {} of {}", rank, ranks_.size()));
  return ranks_[static_cast<std::size_t>(rank)].told;
}

std::optional<std::int64_t> FailureDetector::steps_done() const {
  std::optional<std::int64_t> most;
  for (const Rank& rank : ranks_) {
    if (rank.is_heard) most = std::max(most.value_or(rank.last.step), rank.last.step);
  }
  return most;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "core/error.h"
#include "reference/recovery.h"

namespace tandem::reference {
namespace {

struct Gap {
  int rank = 0;
  double begin = 0, end = 0;
  double last = 0;  // beat that shows what the first one did
  RunPhase phase = RunPhase::start;
  bool is_before_first_beat = false;
};

std::vector<HeardBeat> beats_of(const std::vector<HeardBeat>& trace, int rank) {
  std::vector<HeardBeat> own;
  for (const HeardBeat& heard : trace) {
    if (heard.beat.rank == rank) own.push_back(heard);
  }
  return own;
}

// Between two beats.
std::vector<Gap> silences(const std::vector<HeardBeat>& trace, int rank, double begin, double end) {
  std::vector<Gap> gaps;
  Gap gap{rank, begin, end, begin, RunPhase::start, true};
  for (const HeardBeat& heard : beats_of(trace, rank)) {
    gap.end = heard.seconds;
    gaps.push_back(gap);
    gap = {rank, heard.seconds, end, heard.seconds, heard.beat.phase, false};
  }
  gaps.push_back(gap);
  return gaps;
}

bool shows_the_same(const Heartbeat& one, const Heartbeat& other) {
  return one.progress == other.progress && one.step == other.step && one.phase == other.phase;
}

// Between two signs of progress.
std::vector<Gap> standstills(const std::vector<HeardBeat>& trace, int rank, double end) {
  std::vector<Gap> gaps;
  const std::vector<HeardBeat> beats = beats_of(trace, rank);
  for (std::size_t i = 0; i < beats.size(); ++i) {
    const bool advances = i == 0 || !shows_the_same(beats[i].beat, beats[i - 1].beat);
    if (advances && i > 0) gaps.back().end = beats[i].seconds;
    if (advances) gaps.push_back({rank, beats[i].seconds, end, beats[i].seconds, beats[i].beat.phase, false});
    gaps.back().last = beats[i].seconds;
  }
  return gaps;
}

struct Found {
  Stall stall;
  double end = 0;
  friend bool operator==(const Found&, const Found&) = default;
};

class Analysis {
 public:
  Analysis(const std::vector<HeardBeat>& trace, int ranks, double begin, double end, const StallLimits& limits)
      : trace_(trace), ranks_(ranks), end_(end), limits_(limits), first_step_(end) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (const Gap& gap : silences(trace, rank, begin, end)) silences_.push_back(gap);
      for (const Gap& gap : standstills(trace, rank, end)) standstills_.push_back(gap);
      const std::vector<HeardBeat> beats = beats_of(trace, rank);
      for (std::size_t i = 1; i < beats.size(); ++i) {
        const bool steps = beats[i - 1].beat.phase == RunPhase::train && beats[i].beat.step > beats[i - 1].beat.step;
        if (steps) first_step_ = std::min(first_step_, beats[i].seconds);
      }
    }
  }

  // What is reported decides which times count for the patience, and the patience what is reported later: repeated until nothing
  // changes, which moves from the begin of the trace to its end.
  StallList list() {
    std::vector<Found> found;
    for (std::vector<Found> before{{}}; before != found;) {
      before = found;
      silence_margin_ = stall_margin_ = std::numeric_limits<double>::infinity();
      found = find_dead();
      const std::vector<Found> hung = find_hung(before);
      found.insert(found.end(), hung.begin(), hung.end());
      std::ranges::sort(found, {}, [](const Found& one) { return std::pair(one.stall.due_seconds, one.stall.rank); });
    }
    StallList result;
    for (const Found& one : found) result.stalls.push_back(one.stall);
    result.silence_margin_seconds = silence_margin_;
    result.stall_margin_seconds = stall_margin_;
    return result;
  }

 private:
  void take(const Gap& gap, StallKind kind, double due, std::vector<Found>& found) {
    double& margin = kind == StallKind::dead ? silence_margin_ : stall_margin_;
    margin = std::min(margin, std::abs(gap.end - due));
    if (gap.end > due) found.push_back({{gap.rank, kind, gap.begin, gap.phase, due}, gap.end});
  }

  std::vector<Found> find_dead() {
    std::vector<Found> found;
    for (const Gap& gap : silences_) {
      const double limit = silence_limit(gap);
      if (gap.phase != RunPhase::finished && limit > 0) take(gap, StallKind::dead, gap.begin + limit, found);
    }
    return found;
  }
  std::vector<Found> find_hung(const std::vector<Found>& reported) {
    std::vector<Found> found;
    for (const Gap& gap : standstills_) {
      const std::optional<double> due = when_due(gap, reported);
      if (due) take(gap, StallKind::hung, *due, found);
    }
    return found;
  }

  // Nothing: never.
  [[nodiscard]] std::optional<double> when_due(const Gap& gap, const std::vector<Found>& reported) const {
    const double limit = stall_limit(gap, reported);
    if (limit == 0 || gap.phase == RunPhase::finished) return std::nullopt;
    const double passes = gap.begin + limit;
    if (is_dead(gap.rank, passes)) return std::nullopt;
    return waits(gap.rank, passes, passes) ? deadlock_due(passes, reported) : passes;
  }

  // All wait: when the last of their limits passes. Asked as one of them has.
  [[nodiscard]] std::optional<double> deadlock_due(double moment, const std::vector<Found>& reported) const {
    double due = moment;
    int stalled = 0;
    for (const Gap& gap : standstills_) {
      if (gap.begin > moment || gap.end <= moment) continue;
      const double limit = stall_limit(gap, reported);
      if (limit == 0) return std::nullopt;
      due = std::max(due, gap.begin + limit);
      ++stalled;
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      if (!waits(rank, due, limits_.fresh_seconds)) return std::nullopt;
    }
    return stalled == ranks_ ? std::optional(due) : std::nullopt;
  }

  [[nodiscard]] double of_phase(RunPhase phase) const { return limits_.stall_seconds[static_cast<std::size_t>(phase)]; }
  [[nodiscard]] double silence_limit(const Gap& gap) const {
    if (!gap.is_before_first_beat) return limits_.silent_seconds;
    return of_phase(RunPhase::start) == 0 ? 0 : std::max(limits_.silent_seconds, of_phase(RunPhase::start));
  }

  // That holds when it passes: what the run shows until then counts.
  [[nodiscard]] double stall_limit(const Gap& gap, const std::vector<Found>& reported) const {
    double limit = of_phase(gap.phase);
    if (gap.phase != RunPhase::train) return limit;
    for (double before = -1; before < limit;) {
      before = limit;
      limit = std::max(limit, limits_.patience * longest_shown_until(gap.begin + limit, reported));
      if (first_step_ > gap.begin + limit) limit = std::max(limit, of_phase(RunPhase::start));
    }
    return limit;
  }
  [[nodiscard]] double longest_shown_until(double moment, const std::vector<Found>& reported) const {
    double longest = 0;
    for (const Gap& gap : standstills_) {
      const bool is_over = gap.end <= moment && gap.end < end_;
      const bool is_fault =
          std::ranges::any_of(reported, [&](const Found& one) { return one.stall.due_seconds < gap.end && gap.begin < one.end; });
      if (gap.phase == RunPhase::train && is_over && !is_fault) longest = std::max(longest, gap.last - gap.begin);
    }
    return longest;
  }

  [[nodiscard]] bool is_dead(int rank, double moment) const {
    return std::ranges::any_of(silences_, [&](const Gap& gap) {
      return gap.rank == rank && gap.begin + silence_limit(gap) <= moment && moment < gap.end && gap.phase != RunPhase::finished;
    });
  }
  // As its last beat says; where all are asked, only if that is not long ago.
  [[nodiscard]] bool waits(int rank, double moment, double longest_ago) const {
    const HeardBeat* last = nullptr;
    for (const HeardBeat& heard : trace_) {
      if (heard.beat.rank == rank && heard.seconds <= moment) last = &heard;
    }
    return last != nullptr && last->beat.waiting && moment - last->seconds <= longest_ago;
  }

  const std::vector<HeardBeat>& trace_;
  int ranks_;
  double end_;
  const StallLimits& limits_;
  double first_step_;
  std::vector<Gap> silences_, standstills_;
  double silence_margin_ = 0, stall_margin_ = 0;
};

// Of an even number the mean of the two in the middle.
double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace

StallList stalls(const std::vector<HeardBeat>& trace, int ranks, double begin_seconds, double end_seconds,
                 const StallLimits& limits) {
  TANDEM_CHECK(std::ranges::is_sorted(trace, {}, &HeardBeat::seconds), "a trace is in the order of time");
  return Analysis(trace, ranks, begin_seconds, end_seconds, limits).list();
}

std::vector<int> stragglers(const std::vector<std::vector<double>>& work_seconds, const std::vector<double>& step_seconds,
                            const StragglerRule& rule) {
  std::vector<int> found;
  const auto steps = static_cast<std::ptrdiff_t>(rule.steps);
  if (std::ssize(step_seconds) < steps || work_seconds.size() < 2) return found;
  const double step = median({step_seconds.end() - steps, step_seconds.end()});
  std::vector<double> medians;
  medians.reserve(work_seconds.size());
  for (const std::vector<double>& work : work_seconds) medians.push_back(median({work.end() - steps, work.end()}));
  for (std::size_t rank = 0; rank < medians.size(); ++rank) {
    std::vector<double> others = medians;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(rank));
    const double usual = median(others);
    const bool is_slow = medians[rank] > rule.ratio * usual && medians[rank] - usual > rule.share * step;
    if (is_slow) found.push_back(static_cast<int>(rank));
  }
  return found;
}

}  // namespace tandem::reference

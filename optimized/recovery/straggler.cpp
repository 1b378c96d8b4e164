// SPDX-License-Identifier: Apache-2.0
// The half of the failure detector that compares how long the ranks' own work takes.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "core/quantile.h"
#include "optimized/recovery/failure_detector.h"

namespace tandem {
void FailureDetector::note_work(Rank& rank, const Heartbeat& beat, std::int64_t now_ns) const {
  const bool counts = beat.phase != RunPhase::start && beat.phase != RunPhase::restore;
  if (!counts || beat.step < rank.open_step || beat.busy_ns < rank.open_busy_ns) rank.is_open = false;
  if (!counts) return;
  if (!beat.waiting) ++rank.open.beats[static_cast<std::size_t>(beat.phase)];
  const std::int64_t steps = beat.step - rank.open_step;
  if (rank.is_open && steps == 0) return;
  if (rank.is_open) {
    Work work = rank.open;
    work.steps = steps;
    work.busy_seconds = static_cast<double>(beat.busy_ns - rank.open_busy_ns) / 1e9 / static_cast<double>(steps);
    work.wall_seconds = static_cast<double>(now_ns - work.begin_ns) / 1e9 / static_cast<double>(steps);
    rank.works.push_back(work);
    if (static_cast<int>(rank.works.size()) > options_.straggler_steps) rank.works.pop_front();
    rank.has_new_work = true;
  }
  rank.open = {.begin_ns = now_ns};
  rank.open_step = beat.step;
  rank.open_busy_ns = beat.busy_ns;
  rank.is_open = true;
}

double FailureDetector::seconds_of(const Work& work) const {
  return options_.pitfalls.on(Pitfall::straggler_by_wall_time) ? work.wall_seconds : work.busy_seconds;
}

std::optional<FailureDetector::Typical> FailureDetector::typical_work(const Rank& rank) const {
  if (static_cast<int>(rank.works.size()) < options_.straggler_steps) return std::nullopt;
  std::vector<double> values;
  double sum_seconds = 0, steps = 0;
  for (const Work& work : rank.works) {
    values.push_back(seconds_of(work));
    sum_seconds += seconds_of(work) * static_cast<double>(work.steps);
    steps += static_cast<double>(work.steps);
  }
  return Typical{median(std::move(values)), sum_seconds / steps};
}

void FailureDetector::judge_work() {
  const bool has_news = std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.has_new_work; });
  if (!has_news) return;
  std::vector<std::optional<Typical>> works;
  std::transform(ranks_.begin(), ranks_.end(), std::back_inserter(works), [&](const Rank& rank) { return typical_work(rank); });
  for (std::size_t index = 0; index < ranks_.size(); ++index) {
    if (!std::exchange(ranks_[index].has_new_work, false) || !works[index]) continue;
    std::vector<double> medians, means;
    for (std::size_t other = 0; other < works.size(); ++other) {
      if (other == index || !works[other]) continue;
      medians.push_back(works[other]->median_seconds);
      means.push_back(works[other]->mean_seconds);
    }
    if (medians.empty()) continue;
    const Typical others = {median(std::move(medians)), median(std::move(means))};
    if (others.median_seconds > 0) judge_rank(ranks_[index], *works[index], others);
  }
}

void FailureDetector::judge_rank(Rank& rank, const Typical& own, const Typical& others) {
  const double ratio = options_.straggler_ratio;
  if (rank.is_slow) {
    // Well again half way back only, or a rank at the limit would be told every other step.
    rank.is_slow = own.median_seconds > others.median_seconds * (1 + ratio) / 2;
    if (!rank.is_slow) rank.slow_for = 0;
    return;
  }
  std::vector<double> walls;
  for (const Work& work : rank.works) walls.push_back(work.wall_seconds);
  const bool is_long = own.median_seconds > others.median_seconds * ratio;
  const bool stands_out = own.mean_seconds > others.mean_seconds * (1 + 2 * ratio) / 3;
  const bool matters = own.median_seconds - others.median_seconds > options_.straggler_share * median(std::move(walls));
  rank.slow_for = is_long && stands_out && matters ? rank.slow_for + 1 : 0;
  if (rank.slow_for == 1) find_slow_phase(rank, others);
  if (rank.slow_for <= options_.straggler_steps / 2) return;
  find_slow_phase(rank, others);
  rank.is_slow = true;
  rank.slowness = own.median_seconds / others.median_seconds;
}

// Where it was found at work most often in the steps that were long; and when, at the first look, they began.
void FailureDetector::find_slow_phase(Rank& rank, const Typical& others) const {
  std::array<int, kRunPhases> beats{};
  std::optional<std::int64_t> since_ns;
  for (const Work& work : rank.works) {
    if (seconds_of(work) <= others.median_seconds * std::sqrt(options_.straggler_ratio)) continue;
    if (!since_ns) since_ns = work.begin_ns;
    for (std::size_t phase = 0; phase < kRunPhases; ++phase) beats[phase] += work.beats[phase];
  }
  if (rank.slow_for == 1) rank.slow_since_ns = since_ns.value_or(rank.works.front().begin_ns);
  const auto most = std::max_element(beats.begin(), beats.end());
  rank.slow_phase = *most > 0 ? static_cast<RunPhase>(most - beats.begin()) : rank.last.phase;
}

}  // namespace tandem

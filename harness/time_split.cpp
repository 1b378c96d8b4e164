// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>

#include "harness/interval_set.h"
#include "harness/measurement.h"

namespace tandem {
namespace {

// What a rank did in its measured steps. Spans are classified by their activity alone, never by their name.
class StepWindow {
 public:
  StepWindow(const std::vector<Span>& spans, int first_step, const PitfallSet& pitfalls) : spans_(spans), pitfalls_(pitfalls) {
    std::vector<Interval> steps;
    for (const Span& span : spans) {
      if (span.activity == Activity::step && span.step >= first_step) steps.push_back({span.begin_ns, span.end_ns});
    }
    window_ = IntervalSet(std::move(steps));
  }

  [[nodiscard]] const IntervalSet& window() const noexcept { return window_; }

  [[nodiscard]] IntervalSet time_of(std::initializer_list<Activity> activities) const {
    std::vector<Interval> intervals;
    for (const Span& span : spans_) {
      for (const Activity activity : activities) {
        if (classify(span) == activity) intervals.push_back({span.begin_ns, span.end_ns});
      }
    }
    return IntervalSet(std::move(intervals)).intersected(window_);
  }

  // Nanoseconds of `time`. Durations that are summed instead of united count nested and overlapping spans more than once.
  [[nodiscard]] std::int64_t length(const IntervalSet& time, std::initializer_list<Activity> activities) const {
    if (!pitfalls_.on(Pitfall::spans_summed_not_united)) return time.length();
    std::int64_t sum = 0;
    for (const Span& span : spans_) {
      const IntervalSet clipped = IntervalSet({{span.begin_ns, span.end_ns}}).intersected(window_);
      for (const Activity activity : activities) sum += classify(span) == activity ? clipped.length() : 0;
    }
    return sum;
  }

 private:
  [[nodiscard]] Activity classify(const Span& span) const {
    // A rank that waits for a peer is not computing, even where its thread spins.
    const bool mistaken = pitfalls_.on(Pitfall::waits_counted_as_compute) && span.activity == Activity::wait;
    return mistaken ? Activity::compute : span.activity;
  }

  const std::vector<Span>& spans_;
  const PitfallSet& pitfalls_;
  IntervalSet window_;
};

}  // namespace

TimeSplit split_time(const std::vector<Span>& spans, int first_step, const PitfallSet& pitfalls) {
  const StepWindow steps(spans, first_step, pitfalls);
  const IntervalSet compute = steps.time_of({Activity::compute, Activity::optimizer});
  const IntervalSet communication = steps.time_of({Activity::transfer, Activity::wait});
  const IntervalSet working = compute.united(communication);
  const IntervalSet data = steps.time_of({Activity::data}).without(working);
  const IntervalSet checkpoint = steps.time_of({Activity::checkpoint}).without(working).without(data);

  TimeSplit split;
  split.wall_ns = steps.window().length();
  split.compute_ns = steps.length(compute, {Activity::compute, Activity::optimizer});
  split.communication_busy_ns = steps.length(communication, {Activity::transfer, Activity::wait});
  split.communication_exposed_ns = communication.without(compute).length();
  split.data_ns = data.length();
  split.checkpoint_ns = checkpoint.length();
  split.idle_ns = steps.window().without(working).without(data).without(checkpoint).length();
  return split;
}

}  // namespace tandem

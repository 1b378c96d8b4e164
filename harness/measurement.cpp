// SPDX-License-Identifier: Apache-2.0
#include "harness/measurement.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include <fmt/format.h>

#include "core/error.h"
#include "harness/interval_set.h"

namespace tandem {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kNanosecondsPerSecond = 1e9;

// Seconds of each step by step index, the slowest rank deciding. `end_of` says when a rank's step is over.
template <class EndOf>
std::map<int, double> seconds_by_step(const Measured& measured, EndOf end_of) {
  std::map<int, double> seconds;
  for (const std::vector<Span>& spans : measured.spans_by_rank) {
    for (const Span& step : spans) {
      if (step.activity != Activity::step) continue;
      double& slowest = seconds[step.step];
      slowest = std::max(slowest, static_cast<double>(end_of(spans, step) - step.begin_ns) / kNanosecondsPerSecond);
    }
  }
  return seconds;
}

std::int64_t last_compute_end(const std::vector<Span>& spans, const Span& step) {
  std::int64_t end = step.begin_ns;
  for (const Span& span : spans) {
    const bool inside = span.begin_ns >= step.begin_ns && span.end_ns <= step.end_ns;
    if (inside && span.activity == Activity::compute) end = std::max(end, span.end_ns);
  }
  return end;
}

std::vector<double> counted_samples(const Measured& measured, const PitfallSet& pitfalls) {
  std::vector<double> samples = measured.step_seconds;
  // The clock stops when the last work was handed out, not when it was done: what runs on is paid for by nobody.
  if (pitfalls.on(Pitfall::timer_stopped_before_completion)) {
    samples.clear();
    for (const auto& [step, seconds] : seconds_by_step(measured, last_compute_end)) {
      if (step >= measured.warm_up_steps) samples.push_back(seconds);
    }
  }
  // First steps touch memory for the first time, fill caches and make plans; they are not what a step costs.
  if (pitfalls.on(Pitfall::warm_up_included)) {
    const auto whole_step = [](const std::vector<Span>&, const Span& step) { return step.end_ns; };
    for (const auto& [step, seconds] : seconds_by_step(measured, whole_step)) {
      if (step < measured.warm_up_steps) samples.push_back(seconds);
    }
  }
  return samples;
}

IntervalSet measured_steps(const std::vector<Span>& spans, int first_step) {
  std::vector<Interval> steps;
  for (const Span& span : spans) {
    if (span.activity == Activity::step && span.step >= first_step) steps.push_back({span.begin_ns, span.end_ns});
  }
  return IntervalSet(std::move(steps));
}

void add_bytes(Measurements& result, const Measured& measured) {
  const auto steps = static_cast<std::int64_t>(measured.step_seconds.size());
  result.bytes_by_purpose.assign(kPurposes, 0);
  for (const std::vector<Span>& spans : measured.spans_by_rank) {
    const IntervalSet window = measured_steps(spans, measured.warm_up_steps);
    for (const Span& span : spans) {
      const bool counts = span.step < 0 ? window.contains(span.begin_ns) : span.step >= measured.warm_up_steps;
      if (counts) result.bytes_by_purpose[static_cast<std::size_t>(span.purpose)] += span.bytes;
    }
  }
  for (std::int64_t& bytes : result.bytes_by_purpose) {
    if (steps > 0) bytes /= steps;
    result.bytes_on_wire += bytes;
  }
}

void add_shares(Measurements& result, const Measured& measured, const PitfallSet& pitfalls) {
  std::int64_t wall = 0, busy = 0, exposed = 0, compute = 0, data = 0, checkpoint = 0, idle = 0;
  for (const std::vector<Span>& spans : measured.spans_by_rank) {
    const TimeSplit split = split_time(spans, measured.warm_up_steps, pitfalls);
    wall += split.wall_ns;
    busy += split.communication_busy_ns;
    exposed += split.communication_exposed_ns;
    compute += split.compute_ns;
    data += split.data_ns;
    checkpoint += split.checkpoint_ns;
    idle += split.idle_ns;
  }
  const auto share = [wall](std::int64_t part) {
    return wall > 0 ? static_cast<double>(part) / static_cast<double>(wall) : kNaN;
  };
  result.busy_share = share(busy);
  result.exposed_share = share(exposed);
  result.compute_share = share(compute);
  result.data_share = share(data);
  result.checkpoint_share = share(checkpoint);
  result.idle_share = share(idle);
  if (wall == 0) return;
  const std::array<std::pair<std::int64_t, const char*>, 5> parts = {
      {{compute, "compute"}, {exposed, "communication"}, {data, "data"}, {checkpoint, "checkpoint"}, {idle, "idle"}}};
  result.bottleneck = std::ranges::max_element(parts, {}, [](const auto& part) { return part.first; })->second;
}

}  // namespace

double model_flops_per_row(const GptConfig& model, std::int64_t row_tokens, const PitfallSet& pitfalls) {
  const auto tokens = static_cast<double>(row_tokens);
  const auto hidden = static_cast<double>(model.hidden);
  const auto mlp = static_cast<double>(model.mlp_width());
  const auto vocabulary = static_cast<double>(model.vocabulary);
  // A token passes the experts that it chooses, however many there are.
  const double mlps = model.experts > 0 ? model.expert_choices : 1;
  const double router = 2 * hidden * model.experts;
  const double products = model.layers * (2 * hidden * 3 * hidden + 2 * hidden * hidden + mlps * 2 * 2 * hidden * mlp + router) +
                          2 * hidden * vocabulary;
  // Position t attends to t + 1 positions, so half of the full square is never computed.
  const double pairs = pitfalls.on(Pitfall::full_attention_flops) ? tokens * tokens : tokens * (tokens + 1) / 2;
  const double forward = tokens * products + model.layers * 4 * hidden * pairs;
  return 3 * forward;
}

double utilization(double flops, double seconds, double device_peak_flops_per_second, int devices, const PitfallSet& pitfalls) {
  constexpr double kPossible = 1.05;  // peaks are measured, and a measurement may be a little low
  // The work of all devices belongs over the peak of all devices.
  const int counted_devices = pitfalls.on(Pitfall::peak_of_one_device) ? 1 : devices;
  const double share = flops / seconds / (device_peak_flops_per_second * counted_devices);
  TANDEM_CHECK(share <= kPossible,
               fmt::format("{:.4g} FLOPs in {:.4g} s are {:.3g} of the measured peak, more than the machine can do", flops,
                           seconds, share));
  return share;
}

double bus_bandwidth(Collective collective, double bytes, double seconds, int ranks, const PitfallSet& pitfalls) {
  const double others = static_cast<double>(ranks - 1) / ranks;
  double factor = 1;
  if (collective == Collective::all_reduce || pitfalls.on(Pitfall::all_reduce_factor_for_every_collective)) {
    factor = 2 * others;
  } else if (collective == Collective::reduce_scatter || collective == Collective::all_gather ||
             collective == Collective::all_to_all) {
    factor = others;
  }
  return factor * bytes / seconds;
}

Measurements derive(const Measured& measured, const PitfallSet& pitfalls) {
  Measurements result;
  result.step_seconds = summarise(counted_samples(measured, pitfalls));
  const auto tokens = static_cast<double>(measured.tokens_per_step);
  result.tokens_per_second = tokens / result.step_seconds.median;
  result.tokens_per_second_low = tokens / result.step_seconds.ci95_high;
  result.tokens_per_second_high = tokens / result.step_seconds.ci95_low;
  result.peak_bytes = measured.peak_bytes;
  result.predicted_peak_bytes = measured.predicted_peak_bytes;
  result.predicted_bytes_on_wire = measured.predicted_bytes_on_wire;
  add_bytes(result, measured);
  add_shares(result, measured, pitfalls);
  if (measured.peak_flops_per_second > 0 && measured.model_flops_per_step > 0) {
    const int devices = std::max<int>(1, static_cast<int>(measured.spans_by_rank.size()));
    result.model_flops_utilization = utilization(measured.model_flops_per_step, result.step_seconds.median,
                                                 measured.peak_flops_per_second / devices, devices, pitfalls);
  }
  const std::vector<double>& samples = result.step_seconds.samples;
  result.steps_over_wall = std::accumulate(samples.begin(), samples.end(), 0.0) / measured.wall_seconds;
  return result;
}

}  // namespace tandem

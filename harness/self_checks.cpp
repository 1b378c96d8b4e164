// SPDX-License-Identifier: Apache-2.0
#include "harness/self_checks.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "harness/measurement.h"

namespace tandem {
namespace {

Property equals(std::string name, double value, double limit, std::string derivation) {
  return {std::move(name), value, Relation::equal, limit, std::move(derivation), -1, {}};
}

Span span(Activity activity, std::int64_t begin_ns, std::int64_t end_ns, int step = 1, std::string name = "made up") {
  Span made;
  made.name = std::move(name);
  made.activity = activity;
  made.lane = activity == Activity::transfer ? Lane::communication : Lane::compute;
  made.step = step;
  made.begin_ns = begin_ns;
  made.end_ns = end_ns;
  return made;
}

struct KnownTrace {
  std::string name;
  std::vector<Span> spans;
  TimeSplit answer;
};

std::vector<KnownTrace> known_traces() {
  using enum Activity;
  std::vector<KnownTrace> traces;
  traces.push_back({"nested",
                    {span(step, 0, 100), span(compute, 10, 60), span(compute, 20, 40), span(compute, 20, 30),
                     span(optimizer, 55, 70), span(transfer, 70, 90), span(transfer, 75, 80)},
                    {100, 60, 20, 20, 0, 0, 20}});
  traces.push_back(
      {"overlapping",
       {span(step, 0, 100), span(compute, 0, 50), span(compute, 40, 80), span(transfer, 30, 90), span(transfer, 60, 95)},
       {100, 80, 65, 15, 0, 0, 5}});
  traces.push_back({"zero_length",
                    {span(step, 0, 100), span(compute, 10, 10), span(compute, 20, 80), span(transfer, 90, 90), span(wait, 0, 0)},
                    {100, 60, 0, 0, 0, 0, 40}});
  traces.push_back({"waiting",
                    {span(step, 0, 100), span(compute, 0, 40), span(wait, 40, 70), span(transfer, 60, 90), span(wait, 10, 20)},
                    {100, 40, 60, 50, 0, 0, 10}});
  traces.push_back(
      {"hidden",
       {span(step, 0, 100), span(compute, 0, 90), span(transfer, 10, 80), span(data, 20, 95), span(checkpoint, 85, 98)},
       {100, 90, 70, 0, 5, 3, 2}});
  // Names are for people: a kernel that was renamed, or has no name, is still communication or computation.
  traces.push_back({"unknown_names",
                    {span(step, 0, 100, 1, ""), span(compute, 0, 30, 1, "?"), span(transfer, 30, 50, 1, "compute h.0"),
                     span(wait, 50, 60, 1, "forward")},
                    {100, 30, 30, 30, 0, 0, 40}});
  // Step 0 is warm-up; what lies between the steps belongs to none.
  traces.push_back({"outside",
                    {span(step, 0, 1000, 0), span(compute, 0, 1000, 0), span(step, 1000, 1100), span(compute, 1050, 1250),
                     span(step, 1200, 1300, 2), span(transfer, 1090, 1210)},
                    {200, 100, 20, 0, 0, 0, 100}});
  return traces;
}

void add_split(std::vector<Property>& properties, const std::string& trace, const TimeSplit& split, const TimeSplit& known) {
  const std::string derivation = fmt::format("made-up trace '{}', worked out by hand", trace);
  const auto add = [&](const char* part, std::int64_t value, std::int64_t answer) {
    properties.push_back(
        equals(fmt::format("{}_{}", trace, part), static_cast<double>(value), static_cast<double>(answer), derivation));
  };
  add("wall_ns", split.wall_ns, known.wall_ns);
  add("compute_ns", split.compute_ns, known.compute_ns);
  add("communication_busy_ns", split.communication_busy_ns, known.communication_busy_ns);
  add("communication_exposed_ns", split.communication_exposed_ns, known.communication_exposed_ns);
  add("data_ns", split.data_ns, known.data_ns);
  add("checkpoint_ns", split.checkpoint_ns, known.checkpoint_ns);
  add("idle_ns", split.idle_ns, known.idle_ns);
  const std::int64_t sum =
      split.compute_ns + split.communication_exposed_ns + split.data_ns + split.checkpoint_ns + split.idle_ns;
  properties.push_back(equals(trace + "_parts_ns", static_cast<double>(sum), static_cast<double>(split.wall_ns),
                              "compute + exposed + data + checkpoint + idle = wall"));
}

constexpr std::int64_t kMillisecond = 1'000'000;

// Steps of 80, 120, 100 and 90 ms after a warm-up of 500 ms; each computes for its first 60 ms, reduces until 10 ms before its
// end and then updates. In rank 1 the reduction starts later.
Measured known_run(std::vector<std::int64_t> step_milliseconds) {
  step_milliseconds.insert(step_milliseconds.begin(), 500);
  Measured run;
  run.tokens_per_step = 1000;
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<Span>& spans = run.spans_by_rank.emplace_back();
    std::int64_t begin = 0;
    for (int step = 0; step < static_cast<int>(step_milliseconds.size()); ++step) {
      const std::int64_t end = begin + step_milliseconds[static_cast<std::size_t>(step)] * kMillisecond;
      spans.push_back(span(Activity::compute, begin, begin + 60 * kMillisecond, step));
      spans.push_back(span(Activity::transfer, begin + (50 + 5 * rank) * kMillisecond, end - 10 * kMillisecond, step));
      spans.push_back(span(Activity::optimizer, end - 10 * kMillisecond, end, step));
      spans.push_back(span(Activity::step, begin, end, step));
      begin = end;
    }
  }
  for (std::size_t step = 1; step < step_milliseconds.size(); ++step) {
    run.step_seconds.push_back(static_cast<double>(step_milliseconds[step]) / 1000);
    run.wall_seconds += run.step_seconds.back();
  }
  return run;
}

}  // namespace

std::int64_t count_forward_multiply_adds(const GptConfig& model, std::int64_t row_tokens) {
  std::int64_t count = 0;
  for (std::int64_t position = 0; position < row_tokens; ++position) {
    for (int layer = 0; layer < model.layers; ++layer) {
      for (std::int64_t output = 0; output < 3 * model.hidden; ++output) count += model.hidden;  // query, key, value
      for (int head = 0; head < model.heads; ++head) {
        for (std::int64_t key = 0; key <= position; ++key) {
          count += model.head_size();  // query times key
          count += model.head_size();  // probability times value
        }
      }
      for (std::int64_t output = 0; output < model.hidden; ++output) count += model.hidden;  // attention projection
      for (std::int64_t output = 0; output < model.mlp_width(); ++output) count += model.hidden;
      for (std::int64_t output = 0; output < model.hidden; ++output) count += model.mlp_width();
    }
    for (std::int64_t token = 0; token < model.vocabulary; ++token) count += model.hidden;  // head
  }
  return count;
}

std::vector<Property> flops_properties(std::int64_t counted_multiply_adds, const GptConfig& model, std::int64_t row_tokens,
                                       const PitfallSet& pitfalls) {
  return {equals("model_flops_per_row", model_flops_per_row(model, row_tokens, pitfalls),
                 2 * static_cast<double>(counted_multiply_adds),
                 fmt::format("2 x {} multiply-adds counted in a training step of {} tokens; convention: {}",
                             counted_multiply_adds, row_tokens, kFlopsConvention))};
}

std::vector<Property> utilization_properties(const PitfallSet& pitfalls) {
  double refused = 0;
  try {
    (void)utilization(440, 1, 100, 4, PitfallSet());
  } catch (const ContractError&) {
    refused = 1;
  }
  return {equals("utilization_of_four_devices", utilization(40, 1, 100, 4, pitfalls), 0.1,
                 "40 FLOPs in 1 s on 4 devices of 100 FLOP/s"),
          equals("utilization_above_peak_is_refused", refused, 1, "440 FLOPs in 1 s on 4 devices of 100 FLOP/s")};
}

std::vector<Property> time_split_properties(const PitfallSet& pitfalls) {
  std::vector<Property> properties;
  for (const KnownTrace& trace : known_traces()) {
    add_split(properties, trace.name, split_time(trace.spans, 1, pitfalls), trace.answer);
  }
  return properties;
}

std::vector<Property> timer_properties(const PitfallSet& pitfalls) {
  const Measured run = known_run({80, 120, 100, 90});
  const Measurements measured = derive(run, pitfalls);
  std::vector<Property> properties = timer_properties(run, pitfalls);
  properties.push_back(
      equals("measured_steps", static_cast<double>(measured.step_seconds.samples.size()), 4, "warm-up is left out"));
  properties.push_back(equals("median_step_seconds", measured.step_seconds.median, 0.09 + 0.5 * (0.1 - 0.09),
                              "of 80, 90, 100, 120 ms, the reduction and the update included"));
  properties.push_back(equals("median_after_permuting", derive(known_run({90, 80, 120, 100}), pitfalls).step_seconds.median,
                              measured.step_seconds.median, "the order of steps has no influence"));
  return properties;
}

std::vector<Property> timer_properties(const Measured& measured, const PitfallSet& pitfalls) {
  const double ratio = derive(measured, pitfalls).steps_over_wall;
  const std::string derivation = "the sum of the measured steps is their end-to-end time within 1 %";
  return {{"steps_over_wall_low", ratio, Relation::at_least, 0.99, derivation, -1, {}},
          {"steps_over_wall_high", ratio, Relation::at_most, 1.01, derivation, -1, {}}};
}

}  // namespace tandem

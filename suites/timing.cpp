// SPDX-License-Identifier: Apache-2.0
#include "suites/timing.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "core/timeline.h"
#include "harness/interval_set.h"

namespace tandem {
namespace {

double exposed_seconds_of(const std::vector<Span>& spans, int step) {
  std::vector<Interval> window, compute, communication;
  for (const Span& span : spans) {
    if (span.step == step && span.activity == Activity::step) window.push_back({span.begin_ns, span.end_ns});
    const bool works = span.activity == Activity::compute || span.activity == Activity::optimizer;
    const bool moves = span.activity == Activity::transfer || span.activity == Activity::wait;
    if (works) compute.push_back({span.begin_ns, span.end_ns});
    if (moves) communication.push_back({span.begin_ns, span.end_ns});
  }
  const IntervalSet exposed = IntervalSet(communication).intersected(IntervalSet(window)).without(IntervalSet(compute));
  return static_cast<double>(exposed.length()) * 1e-9;
}

}  // namespace

std::optional<std::string> too_busy_to_time() {
  static constexpr double kSleepSeconds = 0.01;
  constexpr int kThreads = 4;
  constexpr int kSleeps = 5;
  const std::int64_t begin = Timeline::now_ns();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([] {
      for (int sleep = 0; sleep < kSleeps; ++sleep) std::this_thread::sleep_for(std::chrono::duration<double>(kSleepSeconds));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = static_cast<double>(Timeline::now_ns() - begin) * 1e-9;
  if (seconds < 1.1 * kSleeps * kSleepSeconds) return std::nullopt;
  return fmt::format("the machine is busy: {} sleeps of {:.0f} ms took {:.0f} ms", kSleeps, 1e3 * kSleepSeconds, 1e3 * seconds);
}

std::optional<std::string> cannot_time_links(const RunContext& context) {
  if (context.world.transport != "threads") return "links are given times among threads of one process";
  return too_busy_to_time();
}

double exposed_seconds(const Measured& measured) {
  double least = std::numeric_limits<double>::infinity();
  const int steps = measured.warm_up_steps + static_cast<int>(measured.step_seconds.size());
  for (int step = measured.warm_up_steps; step < steps; ++step) {
    double sum = 0;
    for (const std::vector<Span>& spans : measured.spans_by_rank) sum += exposed_seconds_of(spans, step);
    least = std::min(least, sum / static_cast<double>(measured.spans_by_rank.size()));
  }
  return least;
}

bool ends_pass(const Operation& op) {
  if (op.kind != OpKind::compute) return false;
  return (op.phase == Phase::forward && op.part == Part::mlp_merge) ||
         (op.phase == Phase::backward_input && op.part == Part::norm_1) ||
         (op.phase == Phase::backward_weight && op.part == Part::block);
}

LinkProfile stated_link(double latency_seconds, double bytes_per_second) {
  LinkProfile link;
  link.name = "stated";
  link.in_node = link.between_nodes = {latency_seconds, bytes_per_second, 0};
  return link;
}

std::int64_t layer_bytes(const GptConfig& model) {
  std::int64_t elements = 0;
  for (const ParameterSpec& spec : gpt_parameters(model)) {
    if (spec.layer == 0) elements += spec.num_elements();
  }
  return elements * 4;
}

}  // namespace tandem

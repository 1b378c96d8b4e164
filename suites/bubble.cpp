// SPDX-License-Identifier: Apache-2.0
#include "suites/bubble.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "reference/pipeline_schedules.h"
#include "suites/benefits.h"
#include "suites/parallel_cases.h"
#include "suites/timing.h"

namespace tandem {
namespace {

// Forward, input part and weight part of a layer take the same time: long beside the real work of a small model, so that eight
// ranks asleep need no eight cores.
constexpr double kLayerSeconds = 0.01;

double layer_seconds(const Operation& op) { return ends_pass(op) ? kLayerSeconds : 0.0; }

struct Bubble {
  std::string schedule;
  int chunks;
  int micro_batches;
};

std::vector<Property> properties(const PairInputs& inputs, const EngineRun& run) {
  const PipelineConfig& pipeline = inputs.plan.pipeline;
  const reference::PipelineSize size{inputs.plan.parallel.pipeline, pipeline.chunks, inputs.plan.batch.micro_batches};
  std::vector<double> bubbles = measured_bubbles(run.measured, inputs.steps);
  std::sort(bubbles.begin(), bubbles.end());
  const double measured = bubbles[bubbles.size() / 2];
  const double work = 3.0 * size.micro_batches;
  // zb-v fills its ramps but for p - 1 chunks of half a unit (optimized/pipeline_parallel/schedule.h).
  const double expected = pipeline.schedule == "zb-v" ? (size.ranks - 1) / (2 * work + size.ranks - 1)
                                                      : reference::pipeline_bubble_share(pipeline.schedule, size);
  // A rank wakes up late, and the real work of the model comes on top of the stated time.
  constexpr double kTolerance = 0.04;
  return {{"bubble_off_closed_form", std::abs(measured - expected), Relation::at_most, kTolerance,
           fmt::format("measured {:.3f}, {} predicts {:.3f} for p = {}, v = {}, m = {}", measured, pipeline.schedule, expected,
                       size.ranks, size.chunks, size.micro_batches),
           -1, ""}};
}

}  // namespace

std::vector<double> measured_bubbles(const Measured& measured, std::int64_t steps) {
  std::vector<double> bubbles;
  for (int step = measured.warm_up_steps; step < steps; ++step) {
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    std::int64_t last = 0;
    double busy = 0;
    for (const auto& spans : measured.spans_by_rank) {
      for (const Span& span : spans) {
        if (span.step != step || span.activity != Activity::compute) continue;
        first = std::min(first, span.begin_ns);
        last = std::max(last, span.end_ns);
        busy += static_cast<double>(span.end_ns - span.begin_ns);
      }
    }
    bubbles.push_back(1 - busy / (static_cast<double>(measured.spans_by_rank.size()) * static_cast<double>(last - first)));
  }
  return bubbles;
}

void add_bubble_cases(CaseList& cases) {
  constexpr int kRanks = 4;
  const std::vector<Bubble> bubbles = {{"gpipe", 1, 6}, {"1f1b", 1, 6}, {"interleaved", 2, 8}, {"zb-h1", 1, 6}, {"zb-v", 2, 8}};
  for (const Bubble& bubble : bubbles) {
    // One layer a stage and one row a micro-batch: the model's own work is little beside the stated time.
    const ParallelVariant variant{.degrees = {.pipeline = kRanks},
                                  .pipeline = {.schedule = bubble.schedule, .chunks = bubble.chunks},
                                  .micro_batches = bubble.micro_batches,
                                  .rows = bubble.micro_batches,
                                  .layers = kRanks * bubble.chunks};
    Case result =
        parallel_case("pipeline_parallel", fmt::format("ranks{}/bubble/{}", kRanks, bubble.schedule), variant, properties);
    result.summary =
        fmt::format("idle share of {} with layers of {:.0f} ms against its closed form", bubble.schedule, 3e3 * kLayerSeconds);
    result.localise = {};
    result.timed = true;
    result.unavailable = [](const RunContext&) { return too_busy_to_time(); };
    result.execute = [variant](const RunContext& context) {
      PairInputs inputs = inputs_of(variant, context);
      inputs.injected_seconds = layer_seconds;
      inputs.steps = 4;
      EngineRun run;
      CaseEvidence evidence = compare_with_reference(inputs, context, run);
      evidence.properties = properties(inputs, run);
      return evidence;
    };
    cases.push_back(std::move(result));
  }
}

}  // namespace tandem

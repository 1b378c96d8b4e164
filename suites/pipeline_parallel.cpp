// SPDX-License-Identifier: Apache-2.0
// Pipeline parallelism: ranks hold consecutive layers, micro-batches follow each other through them.
// docs/techniques/pipeline_parallel.md
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "reference/pipeline_parallel.h"
#include "reference/pipeline_schedules.h"
#include "suites/benefits.h"
#include "suites/bubble.h"
#include "suites/parallel_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "pipeline_parallel";

reference::NamedTensors<double> lockstep_gradients(const PairInputs& inputs, const Batch& batch) {
  const auto parameters = reference::initial_parameters<double>(inputs.model, inputs.initialization, inputs.seed);
  reference::Pass<double> pass{.valid_tokens = batch.valid_tokens()};
  if (inputs.model.has_dropout()) pass.dropout = reference::DropoutStep{inputs.seed, 0};
  const PipelineLayout stages = pipeline_layout(inputs.plan, inputs.model);
  const auto step = reference::pipeline_parallel_gradients<double>(inputs.model, parameters, batch,
                                                                   {stages, inputs.plan.batch.micro_batches}, pass);
  return reference::joined_stages(inputs.model, stages, step.ranks);
}

// Every stage boundary is crossed by every token's activation and by its gradient; the two embeddings are summed once.
Property message_volume(const PairInputs& inputs, const EngineRun& run) {
  const PipelineLayout stages = pipeline_layout(inputs.plan, inputs.model);
  const std::int64_t tokens = inputs.plan.batch.rows * inputs.data->sequence();
  const auto exchanges = reference::pipeline_parallel_exchanges(inputs.model, stages, tokens);
  const auto element = static_cast<std::int64_t>(size_bytes(inputs.plan.numerics.storage));
  const std::int64_t expected = (exchanges.activations + exchanges.gradients) * element * inputs.steps;
  return {"activation_bytes_on_the_wire",
          static_cast<double>(bytes_sent(run.measured, Purpose::activation)),
          Relation::equal,
          static_cast<double>(expected),
          "steps * 2 * boundaries between ranks * b s h elements",
          -1,
          ""};
}

// Micro-batches in flight at once, by the program, against the schedule's formula; the fullest rank decides the memory.
std::vector<Property> in_flight(const PairInputs& inputs) {
  const PipelineConfig& pipeline = inputs.plan.pipeline;
  const std::string schedule(pipeline.effective_schedule());
  const reference::PipelineSize size{inputs.plan.parallel.pipeline, pipeline.chunks, inputs.plan.batch.micro_batches};
  const ProgramFacts facts = facts_of(inputs);
  const ProcessGrid grid(inputs.plan);
  int beyond = 0;
  for (int rank = 0; rank < grid.size(); ++rank) {
    // zb-v: at most that of 1f1b, two half-size chunks for each of its micro-batches.
    const auto limit = schedule == "zb-v" ? std::min<std::int64_t>(2 * size.ranks, 2 * size.micro_batches)
                                          : reference::pipeline_peak_in_flight(schedule, size, grid.coordinates(rank).pipeline);
    beyond += facts.peak_in_flight[static_cast<std::size_t>(rank)] > limit ? 1 : 0;
  }
  return {{"ranks_with_more_in_flight", static_cast<double>(beyond), Relation::equal, 0,
           "peak of (chunk, micro-batch) activations per rank: reference/pipeline_schedules.h", -1, ""}};
}

std::vector<Property> properties(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> all = in_flight(inputs);
  all.push_back(lockstep_agrees(inputs, lockstep_gradients));
  all.push_back(message_volume(inputs, run));
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::gradient));
  all.push_back(activations_as_predicted(inputs, run.measured));
  all.push_back(state_as_predicted(inputs, run.measured));
  return all;
}

}  // namespace

void add_pipeline_parallel_cases(CaseList& cases) {
  const auto add = [&](const std::string& name, const ParallelVariant& variant, bool quick = true) {
    cases.push_back(parallel_case(kSuite, name, variant, properties, quick));
  };
  add("ranks2/gpipe/fp32", {.degrees = {.pipeline = 2}, .pipeline = {.schedule = "gpipe"}, .micro_batches = 3, .rows = 9});
  add("ranks2/1f1b/fp32", {.degrees = {.pipeline = 2}, .micro_batches = 4, .rows = 12});
  add("ranks2/1f1b/untied/fp32", {.degrees = {.pipeline = 2}, .tied = false, .micro_batches = 3});
  add("ranks2/interleaved/fp32",
      {.degrees = {.pipeline = 2}, .pipeline = {.schedule = "interleaved", .chunks = 2}, .micro_batches = 4, .layers = 4});
  add("ranks2/zb-h1/fp32", {.degrees = {.pipeline = 2}, .pipeline = {.schedule = "zb-h1"}, .micro_batches = 4, .rows = 12});
  add("ranks2/zb-v/fp32",
      {.degrees = {.pipeline = 2}, .pipeline = {.schedule = "zb-v", .chunks = 2}, .micro_batches = 6, .rows = 12, .layers = 5});
  add("ranks3/uneven/fp32", {.degrees = {.pipeline = 3}, .pipeline = {.stage_layers = "1-3-1"}, .micro_batches = 5, .layers = 5});
  add("ranks4/gpipe/fp32", {.degrees = {.pipeline = 4}, .pipeline = {.schedule = "gpipe"}, .micro_batches = 2, .layers = 4},
      false);
  add("ranks4/1f1b/fp32", {.degrees = {.pipeline = 4}, .micro_batches = 5, .layers = 4});
  add("ranks4/interleaved/fp32",
      {.degrees = {.pipeline = 4}, .pipeline = {.schedule = "interleaved", .chunks = 2}, .micro_batches = 4, .layers = 9});
  add("ranks4/zb-h1/fp32", {.degrees = {.pipeline = 4}, .pipeline = {.schedule = "zb-h1"}, .micro_batches = 6, .layers = 4});
  add("ranks3/zb-v/fp32",
      {.degrees = {.pipeline = 3}, .pipeline = {.schedule = "zb-v", .chunks = 2}, .micro_batches = 7, .rows = 14, .layers = 6});
  add("ranks2/data2/1f1b/fp32", {.degrees = {.data = 2, .pipeline = 2}, .micro_batches = 3});
  add("ranks2/interleaved3/fp32",
      {.degrees = {.pipeline = 2}, .pipeline = {.schedule = "interleaved", .chunks = 3}, .micro_batches = 2, .layers = 6}, false);
  add_bubble_cases(cases);
}

}  // namespace tandem

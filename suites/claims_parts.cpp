// SPDX-License-Identifier: Apache-2.0
#include "suites/claims_parts.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/scaling/replay.h"
#include "suites/benefits.h"
#include "suites/timing.h"

namespace tandem {
namespace {

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

}  // namespace

CaseFigures::CaseFigures(const std::function<void(CaseList&)>& add, const std::string& case_name, const RunContext& context)
    : case_(case_name) {
  CaseList cases;
  add(cases);
  const auto found = std::find_if(cases.begin(), cases.end(), [&](const Case& entry) { return entry.name == case_name; });
  TANDEM_CHECK(found != cases.end(), fmt::format("no case {} to take figures from", case_name));
  properties_ = found->execute(context).properties;
}

const Property& CaseFigures::at(std::string_view property) const {
  const auto found =
      std::find_if(properties_.begin(), properties_.end(), [&](const Property& entry) { return entry.name == property; });
  TANDEM_CHECK(found != properties_.end(), fmt::format("case {} has no property {}", case_, property));
  return *found;
}

std::vector<double> CaseFigures::values(std::string_view beginning) const {
  std::vector<double> values;
  for (const Property& property : properties_) {
    if (property.name.starts_with(beginning)) values.push_back(property.value);
  }
  TANDEM_CHECK(!values.empty(), fmt::format("case {} has no property that begins with {}", case_, beginning));
  return values;
}

double CaseFigures::largest(std::string_view beginning) const {
  const std::vector<double> all = values(beginning);
  return *std::max_element(all.begin(), all.end());
}

double CaseFigures::least(std::string_view beginning) const {
  const std::vector<double> all = values(beginning);
  return *std::min_element(all.begin(), all.end());
}

double CaseFigures::sum(std::string_view beginning) const {
  const std::vector<double> all = values(beginning);
  return std::accumulate(all.begin(), all.end(), 0.0);
}

std::function<double(const Operation&)> stated_work(const TrainingPlan& plan, double forward_seconds) {
  const double parts = plan.parallel.data * plan.parallel.tensor * plan.batch.micro_batches;
  const double pass = forward_seconds / parts;
  return [pass](const Operation& op) { return ends_pass(op) ? pass : 0.0; };
}

LinkProfile stated_nodes(int ranks_per_node, double latency_seconds, double bytes_per_second, double slower) {
  LinkProfile link = stated_link(latency_seconds, bytes_per_second);
  link.ranks_per_node = ranks_per_node;
  link.between_nodes = {latency_seconds * slower, bytes_per_second / slower, 0};
  return link;
}

StatedRun stated_prediction(const ParallelVariant& variant, double forward_seconds, const LinkProfile& link,
                            const RunContext& context) {
  StatedRun result{.inputs = inputs_of(variant, context), .run = {}};
  result.inputs.steps = 3;
  result.inputs.injected_seconds = stated_work(result.inputs.plan, forward_seconds);
  const PairInputs& inputs = result.inputs;
  const ReplayTiming timing = replay(inputs.plan, inputs.model, inputs.data->sequence(),
                                     cost_measured({.link = link}, inputs.plan, inputs.injected_seconds));
  result.predicted_step_seconds = timing.step_seconds;
  result.predicted_exposed_seconds = mean(timing.exposed_seconds);
  result.step_seconds = result.exposed_seconds = kNoFigure;
  return result;
}

StatedRun stated_run(const ParallelVariant& variant, double forward_seconds, const LinkProfile& link, const RunContext& context) {
  StatedRun result = stated_prediction(variant, forward_seconds, link, context);
  RunContext shaped = context;
  shaped.world.transport = "threads";
  shaped.world.link = link;
  result.run = engine_run(result.inputs, shaped);
  const std::vector<double>& steps = result.run.measured.step_seconds;
  result.step_seconds = *std::min_element(steps.begin(), steps.end());
  result.exposed_seconds = exposed_seconds(result.run.measured);
  return result;
}

double rest_bytes(const EngineRun& run, MemoryCategory category) {
  std::int64_t most = 0;
  for (const BytesByCategory& bytes : run.rest_bytes) most = std::max(most, bytes[static_cast<std::size_t>(category)]);
  return static_cast<double>(most);
}

double peak_bytes(const EngineRun& run, MemoryCategory category) {
  return static_cast<double>(run.measured.peak_bytes[static_cast<std::size_t>(category)]);
}

double bytes_per_rank_and_step(const PairInputs& inputs, const EngineRun& run) {
  std::int64_t sent = 0;
  for (const Purpose purpose : {Purpose::gradient, Purpose::parameter, Purpose::activation})
    sent += bytes_sent(run.measured, purpose);
  return static_cast<double>(sent) / static_cast<double>(inputs.steps * inputs.plan.parallel.world_size());
}

double programmed_bytes_per_rank(const PairInputs& inputs) {
  const ProgramFacts facts = facts_of(inputs);
  std::int64_t sent = 0;
  for (const Purpose purpose : {Purpose::gradient, Purpose::parameter, Purpose::activation})
    sent += facts.wire_bytes[static_cast<std::size_t>(purpose)];
  return static_cast<double>(sent) / inputs.plan.parallel.world_size();
}

double operations_of(const StatedRun& run) {
  double count = 0;
  for (const std::vector<Span>& spans : run.run.measured.spans_by_rank) {
    count += static_cast<double>(std::count_if(spans.begin(), spans.end(), [](const Span& span) {
      return span.activity == Activity::transfer && span.purpose != Purpose::other && span.bytes > 0;
    }));
  }
  return count / static_cast<double>(run.inputs.steps * run.inputs.plan.parallel.world_size());
}

double busy_seconds(const StatedRun& run) {
  double sum = 0;
  for (const std::vector<Span>& spans : run.run.measured.spans_by_rank) {
    for (const Span& span : spans) {
      const bool counts = span.activity == Activity::compute && span.step >= run.run.measured.warm_up_steps;
      sum += counts ? static_cast<double>(span.end_ns - span.begin_ns) * 1e-9 : 0;
    }
  }
  return sum / static_cast<double>(run.run.measured.spans_by_rank.size());
}

double operations_per_rank(const PairInputs& inputs) {
  double count = 0;
  for (const StepProgram& program : programs_of(inputs)) {
    for (const Operation& op : program) {
      const bool sends = op.kind == OpKind::communicate && op.purpose != Purpose::other && op.collective != Collective::recv;
      count += sends ? 1 : 0;
    }
  }
  return count / inputs.plan.parallel.world_size();
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// The judge's own measurements against answers known without them: FLOPs counted one by one, traces made by hand.
// docs/measuring.md
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "core/synthetic_corpus.h"
#include "harness/measurement.h"
#include "harness/self_checks.h"
#include "reference/gpt.h"
#include "suites/gap.h"
#include "suites/pair.h"
#include "suites/properties.h"
#include "suites/suites.h"

namespace tandem {
namespace {

GptConfig counted_model(std::int64_t mlp_hidden, bool tied) {
  GptConfig model;
  model.vocabulary = 29;
  model.sequence = 13;
  model.layers = 3;
  model.hidden = 14;
  model.heads = 7;
  model.mlp_hidden = mlp_hidden;
  model.tied = tied;
  return model;
}

// Multiply-adds of forward and backward of one row of the reference, counted where they are done.
std::int64_t counted_by_reference(const GptConfig& model, std::int64_t row_tokens, std::uint64_t seed) {
  const SyntheticCorpus corpus({.vocabulary = model.vocabulary, .sequence = row_tokens, .seed = seed});
  const Batch row = corpus.training_batch(0, 1);
  const auto parameters = reference::initial_parameters<double>(model, Initialization::scattered, seed);
  reference::MultiplyAdds counted;
  reference::Pass<double> pass;
  pass.valid_tokens = row.valid_tokens();
  pass.multiply_adds = &counted;
  auto gradients = reference::zero_tensors<double>(model);
  (void)reference::loss_and_gradients<double>(model, parameters, row, pass, gradients);
  return counted.total();
}

Case check_case(const std::string& name, const std::string& summary,
                std::function<std::vector<Property>(const RunContext&)> properties) {
  return property_case("harness", name, summary, std::move(properties));
}

std::vector<Property> flops(const RunContext& context) {
  std::vector<Property> all;
  for (const std::int64_t mlp_hidden : {0, 23}) {
    for (const std::int64_t tokens : {1, 5, 13}) {
      const GptConfig model = counted_model(mlp_hidden, mlp_hidden == 0);
      const auto counted = counted_by_reference(model, tokens, context.seed);
      for (Property& property : flops_properties(counted, model, tokens, context.pitfalls)) all.push_back(std::move(property));
    }
  }
  return all;
}

// A run on this machine: its steps add up to its wall time, its parts to its steps.
std::vector<Property> real_run(const RunContext& context) {
  PairInputs inputs;
  inputs.model = counted_model(0, true);
  inputs.plan.parallel.data = 2;
  inputs.plan.batch.rows = 6;
  inputs.steps = 6;
  inputs.seed = context.seed;
  inputs.data = std::make_shared<SyntheticCorpus>(
      SyntheticOptions{.vocabulary = inputs.model.vocabulary, .sequence = inputs.model.sequence, .seed = context.seed});
  const Measured measured = engine_run(inputs, context).measured;
  std::vector<Property> all = timer_properties(measured, context.pitfalls);
  // The engine stamps its steps itself; the clock around them can only have seen more.
  double stamped = 0;
  for (const Span& span : measured.spans_by_rank.front()) {
    if (span.activity == Activity::step && span.step >= measured.warm_up_steps)
      stamped += static_cast<double>(span.end_ns - span.begin_ns) * 1e-9;
  }
  const double stamped_share = stamped / measured.wall_seconds;
  all.push_back({"stamped_steps_over_wall", stamped_share, Relation::at_most, 1.0,
                 "spans of steps lie inside the end-to-end time", -1, ""});
  all.push_back({"stamped_steps_over_wall_low", stamped_share, Relation::at_least, 0.5,
                 "little happens between steps: making a batch", -1, ""});
  for (std::size_t rank = 0; rank < measured.spans_by_rank.size(); ++rank) {
    const TimeSplit split = split_time(measured.spans_by_rank[rank], measured.warm_up_steps, context.pitfalls);
    const std::int64_t parts =
        split.compute_ns + split.communication_exposed_ns + split.data_ns + split.checkpoint_ns + split.idle_ns;
    all.push_back({fmt::format("parts_minus_wall_ns of rank {}", rank), static_cast<double>(parts - split.wall_ns),
                   Relation::equal, 0.0, "compute + exposed + data + checkpoint + idle = wall, in whole nanoseconds", -1, ""});
  }
  return all;
}

}  // namespace

void add_harness_cases(CaseList& cases) {
  cases.push_back(check_case("flops", "FLOP formula against multiply-adds counted one by one in the reference", flops));
  cases.push_back(check_case("utilization", "share of peak of a made-up machine of four devices",
                             [](const RunContext& context) { return utilization_properties(context.pitfalls); }));
  cases.push_back(check_case("time_split", "compute, exposed communication and idle of traces with known answers",
                             [](const RunContext& context) { return time_split_properties(context.pitfalls); }));
  cases.push_back(check_case("timer", "step times of a made-up run: warm-up left out, completion waited for",
                             [](const RunContext& context) { return timer_properties(context.pitfalls); }));
  add_gap_case(cases);
  cases.push_back(check_case("real_run", "a run on this machine: steps add up to the wall time, parts to the steps", real_run));
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// The engine on batches of documents under every kind of layout: rows as short as one token, another length in every step.
#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "optimized/data_pipeline/text_source.h"
#include "suites/benefits.h"
#include "suites/data_pipeline_cases.h"
#include "suites/parallel_cases.h"

namespace tandem {
namespace {

PairInputs text_inputs(const ParallelVariant& variant, Batching batching, const RunContext& context) {
  PairInputs inputs = inputs_of(variant, context);
  // Shorter by far than the longest row, so that short batches come too.
  const auto store = documents_of(skewed_lengths(80, 26, context.seed), inputs.model.vocabulary);
  const TextDataOptions options{.sequence = inputs.model.sequence,
                                .validation_fraction = 0,
                                .seed = context.seed,
                                .batching = batching,
                                .bucket_batches = 5};
  inputs.data = std::make_shared<TextSource>(store, options, context.pitfalls);
  return inputs;
}

Case layout_case(const std::string& layout, const ParallelVariant& variant, Batching batching) {
  Case result = data_pipeline_case(fmt::format("train/{}/{}/{}", name(batching), layout, variant.precision), "");
  const PairInputs shown = text_inputs(variant, batching, {});
  result.summary = fmt::format("{} rows under {}: gradients and training as the reference on one rank", name(batching),
                               describe_layout(shown.plan));
  result.model = shown.model;
  result.plan = shown.plan;
  result.criterion = Criterion::rounding;
  result.execute = [=](const RunContext& context) {
    const PairInputs inputs = text_inputs(variant, batching, context);
    CaseEvidence evidence = compare_with_reference(inputs, context);
    std::set<std::int64_t> lengths;
    for (std::int64_t step = 0; step < inputs.steps; ++step) {
      lengths.insert(inputs.data->training_batch(step, inputs.plan.batch.rows).sequence);
    }
    if (batching == Batching::bucketed) {
      evidence.properties.push_back({"lengths_of_batches", static_cast<double>(lengths.size()), Relation::at_least, 2,
                                     "buckets: the length of a batch changes from step to step", -1, ""});
    }
    evidence.properties.push_back(proven_program(inputs));
    return evidence;
  };
  result.localise = [=](const RunContext& context) { return localise(text_inputs(variant, batching, context), context); };
  return result;
}

}  // namespace

void add_data_pipeline_layout_cases(CaseList& cases) {
  cases.push_back(layout_case("data3", {.degrees = {.data = 3}, .micro_batches = 2}, Batching::bucketed));
  cases.push_back(
      layout_case("tensor2-sequence_parallel", {.degrees = {.tensor = 2}, .sequence_parallel = true}, Batching::bucketed));
  cases.push_back(
      layout_case("data2-pipeline2", {.degrees = {.data = 2, .pipeline = 2}, .micro_batches = 3}, Batching::bucketed));
  cases.push_back(layout_case("context3", {.degrees = {.context = 3}}, Batching::bucketed));
  cases.push_back(layout_case("data2-zero3", {.degrees = {.data = 2}, .zero_stage = 3}, Batching::bucketed));
  cases.push_back(layout_case("context3", {.degrees = {.context = 3}}, Batching::packed));
  cases.push_back(
      layout_case("context2-tensor2", {.degrees = {.tensor = 2, .context = 2}, .precision = "bf16"}, Batching::packed));
}

}  // namespace tandem

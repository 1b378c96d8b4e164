// SPDX-License-Identifier: Apache-2.0
// Context parallelism: ranks hold slices of the same sequences; keys and values travel around a ring.
// docs/techniques/context_parallel.md
#include <fmt/format.h>

#include "reference/context_parallel.h"
#include "suites/benefits.h"
#include "suites/parallel_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "context_parallel";

reference::NamedTensors<double> lockstep_gradients(const PairInputs& inputs, const Batch& batch) {
  const auto parameters = reference::initial_parameters<double>(inputs.model, inputs.initialization, inputs.seed);
  reference::Pass<double> pass{.valid_tokens = batch.valid_tokens()};
  if (inputs.model.has_dropout()) pass.dropout = reference::DropoutStep{inputs.seed, 0};
  return reference::context_parallel_gradients<double>(inputs.model, parameters, batch, {inputs.plan.parallel.context}, pass)
      .gradients;
}

// Keys and values of all tokens pass every rank but their own, forward and backward; their gradients come home besides.
Property ring_volume(const PairInputs& inputs, const EngineRun& run) {
  const std::int64_t tokens = inputs.plan.batch.rows * inputs.data->sequence();
  const auto exchanges = reference::context_parallel_exchanges(inputs.model, tokens, {inputs.plan.parallel.context});
  const auto element = static_cast<std::int64_t>(size_bytes(inputs.plan.numerics.storage));
  const std::int64_t expected = (exchanges.forward + exchanges.backward) * element * inputs.steps;
  return {"activation_bytes_on_the_wire",
          static_cast<double>(bytes_sent(run.measured, Purpose::activation)),
          Relation::equal,
          static_cast<double>(expected),
          "steps * layers * (forward 2 n (c - 1) + backward 2 n (c - 1) + 2 n c), n = b s h, all ranks",
          -1,
          ""};
}

// The fullest rank keeps its slice of the tokens: two of 2 c chunks, the larger ones first.
Property activation_share(const PairInputs& inputs, const EngineRun& run) {
  const auto activations = static_cast<std::size_t>(MemoryCategory::activations);
  TrainingPlan alone = inputs.plan;
  alone.parallel.context = 1;
  const auto whole =
      static_cast<double>(predicted_peak(inputs.model, alone, inputs.optimizer.kind, inputs.data->sequence())[activations]);
  double largest = 0;
  for (int rank = 0; rank < inputs.plan.parallel.context; ++rank) {
    double tokens = 0;
    for (const Interval& chunk : reference::context_chunks(inputs.data->sequence(), inputs.plan.parallel.context, rank)) {
      tokens += static_cast<double>(chunk.size());
    }
    largest = std::max(largest, tokens);
  }
  return {"activation_bytes_per_rank",
          static_cast<double>(run.measured.peak_bytes[activations]),
          Relation::at_most,
          1.05 * whole * largest / static_cast<double>(inputs.data->sequence()),
          "1.05 * activations of one rank * tokens of the largest slice / tokens of a row",
          -1,
          ""};
}

std::vector<Property> properties(const PairInputs& inputs, const EngineRun& run) {
  return {lockstep_agrees(inputs, lockstep_gradients), ring_volume(inputs, run), activation_share(inputs, run),
          sent_as_programmed(inputs, run.measured, Purpose::gradient)};
}

}  // namespace

void add_context_parallel_cases(CaseList& cases) {
  const auto add = [&](const std::string& name, const ParallelVariant& variant, bool quick = true) {
    cases.push_back(parallel_case(kSuite, name, variant, properties, quick));
  };
  for (const int ranks : {2, 3, 4}) {
    add(fmt::format("ranks{}/fp32", ranks), {.degrees = {.context = ranks}, .tied = ranks % 2 == 0, .micro_batches = 2});
    add(fmt::format("ranks{}/packed/fp32", ranks), {.degrees = {.context = ranks}, .row_shape = RowShape::packed}, ranks < 4);
  }
  add("ranks8/fp32", {.degrees = {.context = 8}, .rows = 2});
  add("ranks3/data2/fp32", {.degrees = {.data = 2, .context = 3}, .micro_batches = 2});
}

}  // namespace tandem

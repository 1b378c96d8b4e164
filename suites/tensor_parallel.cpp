// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism: ranks hold slices of the same matrices and work on the same tokens; with sequence parallelism norms,
// dropout and the residual stream run on slices of the tokens. docs/techniques/tensor_parallel.md
#include <cmath>

#include <fmt/format.h>

#include "reference/tensor_parallel.h"
#include "suites/benefits.h"
#include "suites/parallel_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "tensor_parallel";

reference::NamedTensors<double> lockstep_gradients(const PairInputs& inputs, const Batch& batch) {
  const auto parameters = reference::initial_parameters<double>(inputs.model, inputs.initialization, inputs.seed);
  reference::Pass<double> pass{.valid_tokens = batch.valid_tokens()};
  if (inputs.model.has_dropout()) pass.dropout = reference::DropoutStep{inputs.seed, 0};
  const auto step = reference::tensor_parallel_gradients<double>(
      inputs.model, parameters, batch, {inputs.plan.parallel.tensor, inputs.plan.sequence_parallel}, pass);
  return reference::joined_tensors(inputs.model, step.ranks);
}

// Of one step, by the closed form: in each layer and micro-batch 8 b s h (t - 1) / t elements a rank, the same with and without
// sequence parallelism, and what embedding and head add (reference/tensor_parallel.h). The engine's loss is one gathering of
// three numbers per token: 3 tokens (t - 1) elements sent by each rank.
Property layer_volume(const PairInputs& inputs, const EngineRun& run) {
  const std::int64_t tokens = inputs.plan.batch.rows * inputs.data->sequence();
  const int ranks = inputs.plan.parallel.tensor;
  reference::TensorParallelExchanges exchanges =
      reference::tensor_parallel_exchanges(inputs.model, tokens, {ranks, inputs.plan.sequence_parallel});
  exchanges.loss = 3 * tokens * ranks * (ranks - 1);
  const auto element = static_cast<std::int64_t>(size_bytes(inputs.plan.numerics.storage));
  const std::int64_t expected =
      (exchanges.embedding + exchanges.layers + exchanges.head + exchanges.loss) * element * inputs.steps;
  const auto sent = static_cast<double>(bytes_sent(run.measured, Purpose::activation));
  // Slices of the tokens need not be even, nor need an all-reduced tensor divide by the ranks: an element a rank and operation.
  const double slack = 0.001 * static_cast<double>(expected);
  return {"activation_volume_off_closed_form",
          std::abs(sent - static_cast<double>(expected)),
          Relation::at_most,
          slack,
          fmt::format("0.1 % of {} bytes = steps * (4 layers of 2 n (t - 1) + embedding + head + loss), n = b s h", expected),
          -1,
          ""};
}

std::vector<Property> properties(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> all = {lockstep_agrees(inputs, lockstep_gradients)};
  if (inputs.steps == 0) return all;
  all.push_back(layer_volume(inputs, run));
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::activation));
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::gradient));
  all.push_back(activations_as_predicted(inputs, run.measured));
  all.push_back(state_as_predicted(inputs, run.measured));
  return all;
}

// What a rank holds beside one rank that holds everything: matrices shrink by the number of ranks, the rest is small.
Property memory_ratio(const PairInputs& inputs, const EngineRun& run) {
  const auto parameters = static_cast<std::size_t>(MemoryCategory::parameters);
  const TrainingPlan alone = on_one_rank(inputs.plan);
  const auto whole =
      static_cast<double>(predicted_peak(inputs.model, alone, inputs.optimizer.kind, inputs.data->sequence())[parameters]);
  double replicated = 0;
  for (const LocalParameter& held : local_parameters(inputs.model, inputs.plan, ProcessGrid(inputs.plan), 0)) {
    if (held.shard.is_whole()) replicated += static_cast<double>(held.num_elements());
  }
  const auto element = static_cast<double>(size_bytes(inputs.plan.numerics.storage));
  const double padding = static_cast<double>(inputs.plan.parallel.tensor * inputs.model.hidden) * element;
  const double limit = (whole - replicated * element + padding) / inputs.plan.parallel.tensor + replicated * element + 128;
  return {"parameter_bytes_per_rank",
          static_cast<double>(run.measured.peak_bytes[parameters]),
          Relation::at_most,
          limit,
          "(matrices + vocabulary padding) / t + replicated norms, row biases and positions, rounded up to 64 bytes",
          -1,
          ""};
}

std::vector<Property> with_memory(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> all = properties(inputs, run);
  all.push_back(memory_ratio(inputs, run));
  return all;
}

// The loss alone, which a vocabulary-parallel head can get right with wrong gradients.
Case loss_alone_case() {
  const ParallelVariant variant{.degrees = {.tensor = 3}, .sgd_step_only = true};
  Case result = parallel_case(kSuite, "ranks3/loss_alone/fp32", variant, {});
  result.summary = "shows what a comparison of the loss alone cannot see: it passes whatever the gradients are";
  result.criterion = Criterion::convergence;
  result.localise = {};
  result.execute = [variant](const RunContext& context) {
    const PairInputs inputs = inputs_of(variant, context);
    const double truth = reference_evidence<double>(inputs, 1, 1).losses.front();
    const double found = engine_run(inputs, context).evidence.losses.front();
    CaseEvidence evidence;
    evidence.properties.push_back({"loss_error", std::abs(found - truth) / truth, Relation::at_most, 4 * 0x1p-24 * 8,
                                   "4 eps sqrt(64): vocabulary of 61", 0, ""});
    return evidence;
  };
  return result;
}

}  // namespace

void add_tensor_parallel_cases(CaseList& cases) {
  const auto add = [&](const std::string& name, const ParallelVariant& variant, bool quick = true) {
    cases.push_back(parallel_case(kSuite, name, variant, with_memory, quick));
  };
  for (const int ranks : {2, 3, 4}) {
    for (const bool sequence : {false, true}) {
      const std::string form = fmt::format("ranks{}{}", ranks, sequence ? "/sequence" : "");
      const bool tied = (ranks % 2 == 0) == sequence;
      add(form + "/fp32", {.degrees = {.tensor = ranks}, .sequence_parallel = sequence, .tied = tied, .micro_batches = 2});
      add(form + (tied ? "/untied/fp32" : "/tied/fp32"),
          {.degrees = {.tensor = ranks}, .sequence_parallel = sequence, .tied = !tied, .micro_batches = 2}, false);
    }
  }
  add("ranks6/sequence/packed/fp32", {.degrees = {.tensor = 6}, .sequence_parallel = true, .row_shape = RowShape::packed});
  add("ranks12/fp32", {.degrees = {.tensor = 12}}, false);
  add("ranks4/sequence/rows1/fp32", {.degrees = {.tensor = 4}, .sequence_parallel = true, .rows = 1});
  // Each of the following leaves out what makes a fault visible; suites/pitfalls.json says which.
  add("ranks2/no_dropout/fp32", {.degrees = {.tensor = 2}, .dropout = 0.0});
  add("ranks2/vocabulary64/fp32", {.degrees = {.tensor = 2}, .vocabulary = 64});
  add("ranks2/zero_biases/fp32", {.degrees = {.tensor = 2}, .initialization = Initialization::gpt2, .sgd_step_only = true});
  cases.push_back(loss_alone_case());
}

}  // namespace tandem

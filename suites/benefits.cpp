// SPDX-License-Identifier: Apache-2.0
#include "suites/benefits.h"

#include <algorithm>

#include <fmt/format.h>

#include "optimized/engine/lower.h"

namespace tandem {
namespace {

std::size_t index_of(MemoryCategory category) { return static_cast<std::size_t>(category); }

BytesByCategory closed_form(const PairInputs& inputs) {
  return predicted_peak(inputs.model, inputs.plan, inputs.optimizer.kind, inputs.data->sequence());
}

}  // namespace

std::int64_t predicted_gradient_bytes(const GptConfig& model, const TrainingPlan& plan) {
  const std::int64_t ranks = plan.parallel.data;
  return 2 * (ranks - 1) * num_parameters(model) * static_cast<std::int64_t>(size_bytes(plan.numerics.reduce));
}

std::vector<StepProgram> programs_of(const PairInputs& inputs) {
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < inputs.plan.parallel.world_size(); ++rank) {
    programs.push_back(lower(inputs.plan, inputs.model, inputs.data->sequence(), rank));
  }
  return programs;
}

ProgramFacts facts_of(const PairInputs& inputs) {
  return check_programs(programs_of(inputs), expectation(inputs.plan, inputs.model, inputs.data->sequence()));
}

Property proven_program(const PairInputs& inputs) {
  const ProgramFacts facts = facts_of(inputs);
  const std::string first = facts.problems.empty() ? "complete, ordered, free of deadlock" : facts.problems.front();
  return {"step_program_problems", static_cast<double>(facts.problems.size()), Relation::equal, 0.0, first, -1, ""};
}

std::int64_t bytes_sent(const Measured& measured, Purpose purpose) {
  std::int64_t sent = 0;
  for (const auto& spans : measured.spans_by_rank) {
    for (const Span& span : spans) {
      if (span.activity == Activity::transfer && span.purpose == purpose) sent += span.bytes;
    }
  }
  return sent;
}

Property sent_as_programmed(const PairInputs& inputs, const Measured& measured, Purpose purpose) {
  const std::int64_t programmed = facts_of(inputs).wire_bytes[static_cast<std::size_t>(purpose)] * inputs.steps;
  return {fmt::format("{}_bytes_on_the_wire", name(purpose)),
          static_cast<double>(bytes_sent(measured, purpose)),
          Relation::equal,
          static_cast<double>(programmed),
          "steps * the step programs' bytes_on_wire, all ranks",
          -1,
          ""};
}

Property activations_as_predicted(const PairInputs& inputs, const Measured& measured) {
  const std::size_t activations = index_of(MemoryCategory::activations);
  const std::vector<int> in_flight = facts_of(inputs).peak_in_flight;
  const double tensors = *std::max_element(in_flight.begin(), in_flight.end()) * 17.0 * inputs.model.layers + 4;
  return {"activation_bytes_per_rank",
          static_cast<double>(measured.peak_bytes[activations]),
          Relation::at_most,
          static_cast<double>(closed_form(inputs)[activations]) + 64 * tensors,
          "64 bytes a tensor + in-flight micro-batches * what their blocks keep (docs/measuring.md)",
          -1,
          ""};
}

Property state_as_predicted(const PairInputs& inputs, const Measured& measured) {
  const BytesByCategory form = closed_form(inputs);
  double measured_bytes = 0;
  double predicted = 0;
  for (const MemoryCategory category : {MemoryCategory::parameters, MemoryCategory::gradients, MemoryCategory::optimizer}) {
    measured_bytes += static_cast<double>(measured.peak_bytes[index_of(category)]);
    predicted += static_cast<double>(form[index_of(category)]);
  }
  // Values, gradients, moments and master copies; units that are whole for a while.
  const int zero = inputs.plan.zero_stage;
  const int window = 2 * std::max(2, inputs.plan.recompute.layers);  // a layer may have a unit of experts, too
  const int copies = 5 + (zero >= 2 ? 4 : 0) + (zero >= 3 ? window : 0);
  return {
      "state_bytes_per_rank",
      measured_bytes,
      Relation::at_most,
      predicted + 64.0 * copies,
      fmt::format("what the fullest rank keeps (docs/measuring.md), in at most {} pieces, each rounded up to 64 bytes", copies),
      -1,
      ""};
}

}  // namespace tandem

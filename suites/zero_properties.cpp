// SPDX-License-Identifier: Apache-2.0
// What each stage of ZeRO must save and send, by the formulas of reference/zero.h.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "reference/zero.h"
#include "suites/benefits.h"
#include "suites/one_step.h"
#include "suites/zero_cases.h"

namespace tandem {
namespace {

double of(const BytesByCategory& bytes, MemoryCategory category) {
  return static_cast<double>(bytes[static_cast<std::size_t>(category)]);
}

// Parameters, gradients and optimizer state.
double state_of(const BytesByCategory& bytes) {
  return of(bytes, MemoryCategory::parameters) + of(bytes, MemoryCategory::gradients) + of(bytes, MemoryCategory::optimizer);
}

std::vector<std::int64_t> unit_elements(const GptConfig& model) {
  std::vector<std::int64_t> elements;
  for (const reference::ZeroUnit& unit : reference::zero_units(model)) elements.push_back(unit.elements);
  return elements;
}

// Of plain data parallelism: every unit is dealt to all ranks.
BytesByCategory closed_form(const PairInputs& inputs, int rank, int stage) {
  return reference::zero_state_bytes(unit_elements(inputs.model), inputs.plan.parallel.data, rank, stage,
                                     reference::zero_element_bytes(inputs.plan.numerics, inputs.optimizer.kind));
}

// What the worst rank keeps between steps, over what the formula says of it, as distance from 1.
Property rest_as_closed_form(const PairInputs& inputs, const EngineRun& run) {
  double worst = 0;
  for (int rank = 0; rank < inputs.plan.parallel.data; ++rank) {
    BytesByCategory expected = closed_form(inputs, rank, inputs.plan.zero_stage);
    if (inputs.plan.offload == "optimizer") expected[static_cast<std::size_t>(MemoryCategory::optimizer)] = 0;
    const double measured = state_of(run.rest_bytes[static_cast<std::size_t>(rank)]);
    const double deviation = std::abs(measured / state_of(expected) - 1.0);
    if (!(deviation <= worst)) worst = deviation;
  }
  return {"state_deviation_from_closed_form",
          worst,
          Relation::at_most,
          0.02,
          "reference/zero.h: whole or own part of every unit, by stage; 64 bytes of rounding a buffer",
          -1,
          ""};
}

// A switch that saves nothing is broken: the share of the unsharded state is the formulas' share.
Property saves(const PairInputs& inputs, const EngineRun& run) {
  double measured = 0;
  for (const BytesByCategory& rest : run.rest_bytes) measured = std::max(measured, state_of(rest));
  const double whole = state_of(closed_form(inputs, 0, 0));
  BytesByCategory part = closed_form(inputs, 0, inputs.plan.zero_stage);
  if (inputs.plan.offload == "optimizer") part[static_cast<std::size_t>(MemoryCategory::optimizer)] = 0;
  return {"share_of_unsharded_state",
          measured / whole,
          Relation::at_most,
          1.02 * state_of(part) / whole,
          "1.02 * the closed forms' ratio to stage 0",
          -1,
          ""};
}

std::vector<Property> wire_as_closed_form(const PairInputs& inputs, const EngineRun& run) {
  reference::ZeroWireBytes expected;
  for (const reference::ZeroUnit& unit : reference::zero_units(inputs.model)) {
    const reference::ZeroWireBytes of_unit = reference::zero_wire_bytes(
        unit.elements, reference::zero_gathers(inputs.model, unit), inputs.plan.parallel.data, inputs.plan.zero_stage,
        inputs.plan.batch.micro_batches, static_cast<std::int64_t>(size_bytes(inputs.plan.numerics.reduce)),
        static_cast<std::int64_t>(size_bytes(inputs.plan.numerics.storage)));
    expected.gradients += of_unit.gradients;
    expected.parameters += of_unit.parameters;
  }
  const std::string derivation =
      "steps * reference/zero.h: E (d - 1) elements a reduce-scatter or all-gather, all ranks together";
  const auto property = [&](Purpose purpose, std::int64_t bytes) {
    return Property{fmt::format("{}_bytes_of_closed_form", name(purpose)),
                    static_cast<double>(bytes_sent(run.measured, purpose)),
                    Relation::equal,
                    static_cast<double>(bytes * inputs.steps),
                    derivation,
                    -1,
                    ""};
  };
  return {property(Purpose::gradient, expected.gradients), property(Purpose::parameter, expected.parameters)};
}

Property lockstep_zero(const PairInputs& inputs) {
  return lockstep_agrees(inputs, [](const PairInputs& of_case, const Batch& batch) {
    const auto parameters = reference::initial_parameters<double>(of_case.model, of_case.initialization, of_case.seed);
    const reference::ZeroLayout layout{of_case.plan.zero_stage, {of_case.plan.parallel.data, of_case.plan.batch.micro_batches}};
    auto state = reference::initial_zero_state<double>(of_case.model, layout, OptimizerKind::sgd, parameters);
    std::optional<reference::DropoutStep> dropout;
    if (of_case.model.has_dropout()) dropout = reference::DropoutStep{of_case.seed, 0};
    return reference::zero_step<double>(of_case.model, plain_sgd(of_case), 0.0, batch, layout, dropout, state).gradients;
  });
}

}  // namespace

std::vector<Property> zero_data_parallel_properties(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> all = {rest_as_closed_form(inputs, run), saves(inputs, run), state_as_predicted(inputs, run.measured),
                               activations_as_predicted(inputs, run.measured)};
  for (Property& property : wire_as_closed_form(inputs, run)) all.push_back(std::move(property));
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::gradient));
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::parameter));
  if (!is_16bit(inputs.plan.numerics.storage)) all.push_back(lockstep_zero(inputs));
  return all;
}

std::vector<Property> zero_composed_properties(const PairInputs& inputs, const EngineRun& run) {
  return {state_as_predicted(inputs, run.measured), activations_as_predicted(inputs, run.measured),
          sent_as_programmed(inputs, run.measured, Purpose::gradient),
          sent_as_programmed(inputs, run.measured, Purpose::parameter)};
}

std::vector<Property> zero_offload_properties(const PairInputs& inputs, const EngineRun& run) {
  double on_device = 0;
  double deviation = 0;
  for (int rank = 0; rank < inputs.plan.parallel.data; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const double expected = of(closed_form(inputs, rank, inputs.plan.zero_stage), MemoryCategory::optimizer);
    on_device = std::max(on_device, of(run.peak_bytes[r], MemoryCategory::optimizer));
    const double off = std::abs(of(run.host_bytes[r], MemoryCategory::optimizer) / expected - 1.0);
    if (!(off <= deviation)) deviation = off;
  }
  return {{"optimizer_bytes_on_the_device", on_device, Relation::equal, 0.0, "at no moment of any step", -1, ""},
          {"host_bytes_deviation_from_closed_form", deviation, Relation::at_most, 0.02,
           "reference/zero.h: master copy and moments of the own parts; 64 bytes of rounding a buffer", -1, ""},
          state_as_predicted(inputs, run.measured)};
}

}  // namespace tandem

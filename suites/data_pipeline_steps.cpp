// SPDX-License-Identifier: Apache-2.0
#include "suites/data_pipeline_steps.h"

#include <algorithm>
#include <cmath>

#include "optimized/comm/world.h"
#include "optimized/machine.h"
#include "reference/gpt.h"
#include "suites/machine_of.h"
#include "suites/one_step.h"

namespace tandem {
namespace {

template <class Real>
StepOutcome reference_outcome(const PairInputs& inputs, const reference::NamedTensors<Real>& parameters, const Batch& batch) {
  auto gradients = reference::zero_tensors<Real>(inputs.model);
  reference::Pass<Real> pass;
  pass.valid_tokens = batch.valid_tokens();
  pass.global_rows = batch.rows;
  if (inputs.model.has_dropout()) pass.dropout = reference::DropoutStep{inputs.seed, 0};
  StepOutcome outcome;
  outcome.loss = reference::loss_and_gradients(inputs.model, parameters, batch, pass, gradients);
  outcome.valid_tokens = static_cast<double>(batch.valid_tokens());
  for (const auto& [name, values] : gradients) outcome.gradients[name].assign(values.begin(), values.end());
  return outcome;
}

template <class Real>
std::vector<StepOutcome> outcomes_in(const PairInputs& inputs, const std::vector<Batch>& batches) {
  const auto parameters = reference::initial_parameters<Real>(inputs.model, inputs.initialization, inputs.seed);
  std::vector<StepOutcome> outcomes;
  for (const Batch& batch : batches) outcomes.push_back(reference_outcome(inputs, parameters, batch));
  return outcomes;
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

}  // namespace

std::vector<StepOutcome> engine_outcomes(const PairInputs& inputs, const std::vector<Batch>& batches, const RunContext& context) {
  std::vector<StepOutcome> outcomes;
  run_world({.ranks = 1}, [&](Communicator& comm) {
    const auto kernels = make_kernels(inputs.plan, machine_of(context));
    for (const Batch& batch : batches) {
      Arena arena({.poison = true, .memory = &kernels->memory()});
      TrainingPlan plan = inputs.plan;
      plan.batch = {batch.rows, 1};
      Engine engine({&comm, kernels.get(), &arena, nullptr, context.pitfalls, {}},
                    {inputs.model, plan, plain_sgd(inputs), {}, 1, inputs.seed, {}});
      engine.store().initialise(inputs.model, inputs.initialization, inputs.seed);
      StepOutcome outcome;
      engine.set_gradient_observer([&](const Engine& e) {
        for (std::size_t i = 0; i < e.store().size(); ++i)
          outcome.gradients[e.store().spec(i).name] = ParameterStore::values_of(e.store().memory(), e.store().gradient(i));
      });
      const StepResult done = engine.train_step(batch, 0);
      outcome.loss = done.loss;
      outcome.valid_tokens = static_cast<double>(done.valid_tokens);
      outcomes.push_back(std::move(outcome));
    }
  });
  return outcomes;
}

std::vector<StepOutcome> reference_outcomes(const PairInputs& inputs, const std::vector<Batch>& batches) {
  if (inputs.plan.precision == "fp64") return outcomes_in<double>(inputs, batches);
  return outcomes_in<float>(inputs, batches);
}

double tensors_that_differ(const StepOutcome& a, const StepOutcome& b) {
  double differ = a.loss == b.loss ? 0 : 1;
  for (const auto& [name, values] : b.gradients) differ += a.gradients.at(name) == values ? 0 : 1;
  return differ;
}

double largest_difference(const StepOutcome& a, const StepOutcome& b) {
  double whole = 0;
  for (const auto& [name, values] : b.gradients) whole = std::hypot(whole, norm(values));
  double largest = std::abs(a.loss - b.loss) / std::abs(b.loss);
  for (const auto& [name, values] : b.gradients) {
    std::vector<double> difference = a.gradients.at(name);
    for (std::size_t i = 0; i < difference.size(); ++i) difference[i] -= values[i];
    const double relative = norm(difference) / std::max(norm(values), 0.01 * whole);
    if (!(relative <= largest)) largest = relative;
  }
  return largest;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "suites/golden_run.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/machine.h"
#include "reference/training.h"

namespace tandem {
namespace {

using Tensors = GoldenRun::Tensors;

template <class Real>
Tensors as_double(const reference::NamedTensors<Real>& tensors) {
  Tensors result;
  for (const auto& [name, values] : tensors) result.emplace(name, std::vector<double>(values.begin(), values.end()));
  return result;
}

reference::TrainingRun training_run(const GoldenSet& set, const TrainingPlan& plan) {
  reference::TrainingRun run;
  run.model = set.model;
  run.optimizer = set.optimizer;
  run.layout = {1, static_cast<int>(set.micro_batches)};
  run.steps = set.steps;
  run.batch = [&](std::int64_t step) { return set.batches[static_cast<std::size_t>(step)]; };
  if (!is_narrow(plan.numerics)) return run;
  run.layout = {plan.parallel.data, plan.batch.micro_batches};
  run.numerics = plan.numerics;
  run.loss_scale = plan.loss_scale;
  run.fp8 = plan.fp8;
  run.materialized_attention = plan.attention == "materialized";
  return run;
}

template <class Real>
GoldenRun reference_run(const GoldenSet& set, const TrainingPlan& plan) {
  reference::NamedTensors<Real> initial;
  for (const auto& [name, values] : set.initial_parameters)
    initial.emplace(name, std::vector<Real>(values.begin(), values.end()));
  const auto record = reference::train<Real>(training_run(set, plan), initial);
  return {record.losses,
          record.gradient_norms,
          record.clip_coefficients,
          static_cast<int>(std::count(record.skipped.begin(), record.skipped.end(), true)),
          as_double(record.gradients_step0),
          as_double(record.parameters_step1),
          as_double(record.parameters),
          as_double(record.optimizer.m),
          as_double(record.optimizer.v)};
}

// Puts what each rank keeps into whole tensors; safe from several ranks at once.
class Collector {
 public:
  void collect(const ParameterStore& store, PartView view, double unit, Tensors& into) {
    const std::scoped_lock lock(mutex_);
    for (const OwnedPart& part : store.parts()) {
      const ShardSpec& shard = part.shard;
      if (shard.replica_index != 0) continue;
      std::vector<double>& whole = into[shard.global_name];
      if (whole.empty()) whole.assign(static_cast<std::size_t>(num_elements(shard.global_shape)), std::nan(""));
      std::vector<double> values = ParameterStore::values_of(store.memory(), (store.*view)(part));
      for (double& value : values) value /= unit;
      scatter_into(shard, values, whole);
    }
  }

 private:
  std::mutex mutex_;
};

void engine_rank(const GoldenSet& set, const TrainingPlan& plan, const MachineChoice& machine, Communicator& comm,
                 Collector& collector, GoldenRun& run) {
  const auto kernels = make_kernels(plan, machine);
  Arena arena({.poison = true, .memory = &kernels->memory()});
  Engine engine({&comm, kernels.get(), &arena, nullptr, machine.pitfalls, {}},
                {set.model, plan, set.optimizer, {}, set.steps, 1, {}});
  ParameterStore& store = engine.store();
  for (std::size_t i = 0; i < store.size(); ++i) {
    const std::vector<float>& values = set.initial_parameters.at(store.spec(i).name);
    store.set_parameter(i, gather_from(store.shard(i), {values.begin(), values.end()}));
  }
  store.zero_moments();
  for (std::int64_t step = 0; step < set.steps; ++step) {
    if (step == 0) {
      engine.set_gradient_observer([&](const Engine& e) {
        collector.collect(e.store(), &ParameterStore::gradient, e.loss_scaler().scale(), run.gradients_step0);
      });
    }
    const StepResult result = engine.train_step(set.batches[static_cast<std::size_t>(step)], step);
    engine.set_gradient_observer({});
    if (step == 0) collector.collect(store, &ParameterStore::master, 1.0, run.parameters_step1);
    if (comm.rank() != 0) continue;
    run.losses.push_back(result.loss);
    run.norms.push_back(result.gradient_norm);
    run.coefficients.push_back(result.clip_coefficient);
    if (result.skipped) ++run.skipped_steps;
  }
  collector.collect(store, &ParameterStore::master, 1.0, run.parameters_last);
  collector.collect(store, &ParameterStore::first_moment, 1.0, run.first_moments);
  collector.collect(store, &ParameterStore::second_moment, 1.0, run.second_moments);
}

}  // namespace

bool is_narrow(const Numerics& numerics) { return is_16bit(numerics.storage) || is_16bit(numerics.compute) || numerics.fp8; }

GoldenRun golden_reference_run(const GoldenSet& set, const TrainingPlan& plan) {
  return plan.numerics.storage == DType::f64 ? reference_run<double>(set, plan) : reference_run<float>(set, plan);
}

GoldenRun golden_engine_run(const GoldenSet& set, const TrainingPlan& plan, const MachineChoice& machine) {
  require_legal(plan, set.model);
  GoldenRun run;
  Collector collector;
  run_world({.ranks = plan.parallel.world_size()},
            [&](Communicator& comm) { engine_rank(set, plan, machine, comm, collector, run); });
  return run;
}

}  // namespace tandem

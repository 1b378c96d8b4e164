// SPDX-License-Identifier: Apache-2.0
#include "suites/checkpoint_run.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/load.h"
#include "optimized/comm/world.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/machine.h"
#include "reference/optimizer.h"
#include "suites/machine_of.h"
#include "suites/one_step.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kDeadline{20000};
constexpr std::pair<const char*, PartView> kViews[] = {
    {"", &ParameterStore::master}, {"m.", &ParameterStore::first_moment}, {"v.", &ParameterStore::second_moment}};

// Whole tensors in one process's memory, into which every rank puts what it holds, element by element. Bytes that no rank has
// written yet are unknown; of those that several write all must be equal.
class StateCollector {
 public:
  void add(const std::string& name, const ShardSpec& shard, TensorView values) {
    const std::scoped_lock lock(mutex_);
    reference::StateTensor& tensor = state_.tensors[name];
    std::vector<char>& known = known_[name];
    const std::size_t size = size_bytes(values.dtype());
    if (tensor.bytes.empty()) {
      tensor = {shard.global_shape, values.dtype(), {}};
      tensor.bytes.resize(static_cast<std::size_t>(num_elements(shard.global_shape)) * size);
      known.assign(static_cast<std::size_t>(num_elements(shard.global_shape)), 0);
    }
    const std::vector<std::int64_t> indices = global_indices(shard);
    const auto* bytes = static_cast<const std::byte*>(values.data());
    for (std::size_t i = 0; i < indices.size(); ++i) {
      if (indices[i] < 0) continue;
      const auto index = static_cast<std::size_t>(indices[i]);
      if (known[index] != 0 && std::memcmp(&tensor.bytes[index * size], bytes + i * size, size) != 0) ++differing_;
      std::memcpy(&tensor.bytes[index * size], bytes + i * size, size);
      known[index] = 1;
    }
  }

  // Throws where an element of a tensor is held by nobody.
  reference::State finish(double& differing) {
    for (const auto& [name, known] : known_) {
      for (const char element : known) TANDEM_CHECK(element != 0, fmt::format("an element of {} is on no rank", name));
    }
    differing += differing_;
    return std::exchange(state_, {});
  }
  reference::State& state() { return state_; }

 private:
  std::mutex mutex_;
  reference::State state_;
  std::map<std::string, std::vector<char>> known_;
  double differing_ = 0;
};

// What all ranks share.
struct Shared {
  std::mutex mutex;
  std::optional<StateCollector> collector;
};

void collect_tensors(const Engine& engine, StateCollector& collector) {
  const ParameterStore& store = engine.store();
  for (const OwnedPart& part : store.parts()) {
    for (const auto& [prefix, view] : kViews) {
      const TensorView values = (store.*view)(part);
      if (!values) continue;
      const HostView host(store.memory(), values, Access::read);
      collector.add(prefix + part.shard.global_name, part.shard, host.view());
    }
  }
  if (engine.compression() == nullptr) return;
  for (const CompressedTensor& tensor : engine.compression()->options().tensors) {
    const std::span<const float> values = engine.compression()->residual(tensor.name);
    if (values.empty()) continue;
    const Shape shape = {std::ssize(values)};
    collector.add(fmt::format("residuals-{:05}/residual.{}", engine.groups().rank(), tensor.name),
                  whole(tensor.name, shape, DType::f32), TensorView(const_cast<float*>(values.data()), DType::f32, shape));
  }
}

void fill_fields(const Engine& engine, const PairInputs& inputs, std::int64_t steps_done, reference::State& state) {
  const LossScalerState& scaler = engine.loss_scaler().state();
  state.next_step = steps_done;
  state.updates = engine.updates();
  state.seed = inputs.seed;
  state.data_identity = inputs.data->identity();
  state.learning_rate =
      reference::learning_rate(own_optimizer(inputs), inputs.schedule, steps_done - scaler.skipped_steps, inputs.steps);
  state.loss_scale = scaler.scale;
  state.growth_tracker = scaler.growth_tracker;
  state.skipped_steps = scaler.skipped_steps;
  if (engine.fp8_scaling() == nullptr) return;
  state.fp8_histories = engine.fp8_scaling()->state().histories;
  state.fp8_position = engine.fp8_scaling()->state().position;
}

// One rank's part of run_checkpoints().
class RankRun {
 public:
  RankRun(const CheckpointScript& script, const RunContext& context, Communicator& comm, CheckpointRun& result, Shared& shared)
      : script_(script),
        pitfalls_(context.pitfalls),
        comm_(comm),
        result_(result),
        shared_(shared),
        kernels_(make_kernels(script.inputs.plan, machine_of(context))),
        engine_({&comm, kernels_.get(), &arena_, nullptr, context.pitfalls, {}}, options(script)) {}

  void run() {
    const PairInputs& inputs = script_.inputs;
    const std::int64_t end = script_.end < 0 ? inputs.steps : script_.end;
    engine_.store().initialise(inputs.model, inputs.initialization, inputs.seed);
    load();
    std::optional<Checkpointer> checkpointer;
    if (!script_.checkpoints.folder.empty()) checkpointer.emplace(script_.checkpoints, engine_);
    record_and_save(script_.first_step, checkpointer);
    for (std::int64_t step = script_.first_step; step < end; ++step) {
      const StepResult done = engine_.train_step(inputs.data->training_batch(step, inputs.plan.batch.rows), step);
      if (comm_.rank() == 0) result_.steps.push_back(done);
      if (checkpointer) checkpointer->poll();
      if (script_.after_step && checkpointer) script_.after_step(comm_.rank(), step + 1, *checkpointer);
      record_and_save(step + 1, checkpointer);
    }
    if (checkpointer) finish(*checkpointer);
    result_.rows[index()] = engine_.rows();
    record(end, result_.end);
  }

 private:
  [[nodiscard]] std::size_t index() const { return static_cast<std::size_t>(comm_.rank()); }

  static EngineOptions options(const CheckpointScript& script) {
    const PairInputs& inputs = script.inputs;
    EngineOptions made{inputs.model, inputs.plan, own_optimizer(inputs), inputs.schedule, inputs.steps, inputs.seed, {}, {}};
    made.gate = script.gate;
    return made;
  }

  void load() {
    if (script_.load.empty()) return;
    const std::filesystem::path folder = script_.verifies ? find_checkpoint(script_.load, {}, pitfalls_) : script_.load;
    load_checkpoint(folder, read_checkpoint_info(folder), engine_);
  }

  void record_and_save(std::int64_t steps_done, std::optional<Checkpointer>& checkpointer) {
    const bool saves = checkpointer && script_.saved_after.contains(steps_done);
    if (saves || script_.recorded_after.contains(steps_done)) {
      reference::State state;
      record(steps_done, state);
      if (comm_.rank() == 0) result_.states[steps_done] = std::move(state);
    }
    if (!saves) return;
    if (script_.settled_before.contains(steps_done)) {
      checkpointer->finish();
      comm_.barrier();
    }
    if (script_.before_save) script_.before_save(comm_.rank(), steps_done);
    comm_.barrier();
    checkpointer->save(info_of(script_.inputs, steps_done));
    if (script_.after_save) script_.after_save(comm_.rank(), steps_done);
  }

  void finish(Checkpointer& checkpointer) {
    checkpointer.finish();
    result_.times[index()] = checkpointer.times();
    result_.problems[index()] = checkpointer.problems();
    result_.newest[index()] = checkpointer.newest();
    if (script_.after_finish) script_.after_finish(comm_.rank(), checkpointer);
  }

  // Rank 0 gets the state.
  void record(std::int64_t steps_done, reference::State& state) {
    if (comm_.rank() == 0) shared_.collector.emplace();
    comm_.barrier();
    collect_tensors(engine_, *shared_.collector);
    comm_.barrier();
    if (comm_.rank() != 0) return;
    fill_fields(engine_, script_.inputs, steps_done, shared_.collector->state());
    state = shared_.collector->finish(result_.copies_that_differ);
  }

  const CheckpointScript& script_;
  PitfallSet pitfalls_;
  Communicator& comm_;
  CheckpointRun& result_;
  Shared& shared_;
  std::unique_ptr<Kernels> kernels_;
  Arena arena_{{.poison = true, .memory = &kernels_->memory()}};
  Engine engine_;
};

}  // namespace

CheckpointInfo info_of(const PairInputs& inputs, std::int64_t steps_done) {
  CheckpointInfo info;
  info.config = run_config_of(inputs);
  info.config.optimizer = own_optimizer(inputs);
  info.next_step = steps_done;
  info.data = "synthetic";
  info.data_identity = inputs.data->identity();
  return info;
}

std::filesystem::path step_folder(const std::filesystem::path& folder, std::int64_t step) {
  return folder / fmt::format("step-{:08}", step);
}

CheckpointRun run_checkpoints(const CheckpointScript& script, const RunContext& context) {
  CheckpointRun run;
  const auto ranks = static_cast<std::size_t>(script.inputs.plan.parallel.world_size());
  run.times.resize(ranks);
  run.problems.resize(ranks);
  run.newest.resize(ranks);
  run.rows.resize(ranks);
  Shared shared;
  WorldSettings settings = context.world;
  settings.transport = "threads";
  run_world({.ranks = static_cast<int>(ranks), .deadline = kDeadline, .settings = settings},
            [&](Communicator& comm) { RankRun(script, context, comm, run, shared).run(); });
  return run;
}

Property equal_states(const std::string& name, const reference::State& expected, const reference::State& found,
                      const std::string& derivation, int step) {
  const std::vector<std::string> names = reference::differences(expected, found);
  return {name, static_cast<double>(names.size()), Relation::equal, 0.0, derivation, step, names.empty() ? "" : names.front()};
}

Property equal_on_disk(const std::string& name, const reference::State& expected, const std::filesystem::path& folder,
                       const std::string& derivation, int step) {
  try {
    return equal_states(name, expected, reference::assemble(folder), derivation, step);
  } catch (const InputError& error) {
    return {name, std::nan(""), Relation::equal, 0.0, fmt::format("{}; {}", derivation, error.what()), step, ""};
  }
}

double steps_that_differ(const std::vector<StepResult>& expected, const std::vector<StepResult>& found) {
  if (expected.size() != found.size()) return std::nan("");
  double differing = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const StepResult& a = expected[i];
    const StepResult& b = found[i];
    const bool same = a.loss == b.loss && a.gradient_norm == b.gradient_norm && a.clip_coefficient == b.clip_coefficient &&
                      a.learning_rate == b.learning_rate && a.loss_scale == b.loss_scale && a.skipped == b.skipped &&
                      a.valid_tokens == b.valid_tokens;
    differing += same ? 0 : 1;
  }
  return differing;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "suites/loss_scaling_run.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <span>

#include <fmt/format.h>

#include "core/io/hash.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "optimized/context_parallel/zigzag.h"
#include "optimized/engine/whole_tensors.h"
#include "optimized/machine.h"
#include "suites/evidence_bytes.h"
#include "suites/evidence_stage.h"
#include "suites/machine_of.h"
#include "suites/one_step.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kDeadline{20000};

std::uint64_t hash_of(const ParameterStore& store, TensorView values, std::uint64_t seed = 0) {
  const HostView host(store.memory(), values, Access::read);
  const TensorView view = host.view();
  return hash64({static_cast<const std::byte*>(view.data()), static_cast<std::size_t>(view.size_bytes())}, seed);
}

constexpr PartView kViews[] = {&ParameterStore::master, &ParameterStore::first_moment, &ParameterStore::second_moment};
constexpr std::string_view kStages[] = {"script_parameters", "first_moments", "second_moments"};

std::uint64_t state_hash(const ParameterStore& store) {
  std::uint64_t hash = 0;
  for (const OwnedPart& part : store.parts()) {
    hash = hash_of(store, store.stored(part), hash);
    for (const PartView view : kViews) {
      if ((store.*view)(part)) hash = hash_of(store, (store.*view)(part), hash);
    }
  }
  return hash;
}

std::int64_t stale_copies(const ParameterStore& store) {
  if (!store.has_master_copy()) return 0;
  std::int64_t stale = 0;
  for (const OwnedPart& part : store.parts()) {
    const std::vector<double> stored = ParameterStore::values_of(store.memory(), store.stored(part));
    const std::vector<double> master = ParameterStore::values_of(store.memory(), store.master(part));
    for (std::size_t i = 0; i < stored.size(); ++i) {
      if (stored[i] != round_to(static_cast<float>(master[i]), store.storage())) ++stale;
    }
  }
  return stale;
}

// Puts a value that is not finite where this rank alone has it.
void spoil(ParameterStore& store, const std::string& which, std::int64_t step) {
  const double value = step % 4 < 2 ? std::numeric_limits<double>::infinity() : std::nan("");
  for (const OwnedPart& part : store.parts()) {
    if (part.elements.size() == 0 || part.shard.global_name.find(which) == std::string::npos) continue;
    const TensorView gradient = store.gradient(part).flat();
    ParameterStore::assign(store.memory(), gradient.flat(gradient.num_elements() / 2, 1), {value});
    return;
  }
  throw ContractError(fmt::format("this rank keeps no part of a tensor '{}'", which));
}

// One rank's part of run_script().
class RankScript {
 public:
  RankScript(const Script& script, const RunContext& context, Communicator& comm, ScriptedRun& result, std::mutex& mutex)
      : script_(script),
        comm_(comm),
        result_(result),
        mutex_(mutex),
        kernels_(make_kernels(script.inputs.plan, machine_of(context))),
        engine_({&comm, kernels_.get(), &arena_, nullptr, context.pitfalls, comm.rank() == 0 ? script.trace : TraceSink()},
                options(script, comm.rank())) {}

  void run() {
    const PairInputs& inputs = script_.inputs;
    engine_.store().initialise(inputs.model, inputs.initialization, inputs.seed);
    if (script_.prepare) script_.prepare(engine_);
    collect(&ParameterStore::master, kInitialParameters, 0);
    if (!script_.load.empty()) {
      const std::filesystem::path folder = find_checkpoint(script_.load);
      load_checkpoint(folder, read_checkpoint_info(folder), engine_);
    }
    result_.start[index()] = state_after(-1, {});
    for (std::int64_t step = script_.first_step; step < inputs.steps; ++step) {
      if (script_.left_out && script_.left_out(step)) continue;
      if (script_.before_step) script_.before_step(engine_, step);
      const StepResult done = engine_.train_step(inputs.data->training_batch(step, inputs.plan.batch.rows), step);
      result_.steps[index()].push_back(state_after(step, done));
      if (step + 1 == script_.save_after) save();
    }
    const auto last = static_cast<int>(inputs.steps) - 1;
    for (std::size_t i = 0; i < std::size(kViews); ++i) {
      if (i == 0 || inputs.optimizer.kind == OptimizerKind::adamw) collect(kViews[i], kStages[i], last);
    }
  }

 private:
  [[nodiscard]] std::size_t index() const { return static_cast<std::size_t>(comm_.rank()); }

  static EngineOptions options(const Script& script, int rank) {
    const PairInputs& inputs = script.inputs;
    EngineOptions options{inputs.model, inputs.plan, own_optimizer(inputs), inputs.schedule, inputs.steps, inputs.seed, {}, {}};
    options.inject_gradient_fault = [&script, rank](ParameterStore& store, std::int64_t step) {
      if (script.gradients && rank == 0) script.gradients(store, step);
      if (script.overflows && script.overflows(rank, step)) spoil(store, script.spoiled, step);
    };
    return options;
  }

  [[nodiscard]] RankStep state_after(std::int64_t step, const StepResult& done) const {
    RankStep state;
    state.step = step;
    state.result = done;
    state.scaler = engine_.loss_scaler().state();
    if (engine_.fp8_scaling() != nullptr) state.fp8 = engine_.fp8_scaling()->state();
    state.updates = engine_.updates();
    state.state_hash = state_hash(engine_.store());
    state.stale_copies = stale_copies(engine_.store());
    return state;
  }

  void save() {
    RunConfig config;
    config.model = script_.inputs.model;
    config.plan = script_.inputs.plan;
    config.optimizer = script_.inputs.optimizer;
    config.schedule = script_.inputs.schedule;
    config.steps = script_.inputs.steps;
    static_cast<void>(save_checkpoint(script_.save, engine_, {config, script_.save_after, "synthetic"}));
  }

  void collect(PartView view, std::string_view stage, int step) {
    const std::vector<WholeTensor> whole =
        gather_whole_tensors(comm_, script_.inputs.model, script_.inputs.plan, engine_.store(), view);
    std::vector<StageTensor> tensors;
    for (const WholeTensor& tensor : whole) tensors.push_back({tensor.name, ParameterStore::values_of(tensor.values)});
    const std::scoped_lock lock(mutex_);
    if (comm_.rank() == 0) result_.evidence.stages.push_back(make_stage(script_.inputs, stage, step, std::move(tensors)));
    for (const OwnedPart& part : engine_.store().parts()) {
      result_.evidence.replicas.push_back({part.shard.global_name, part.shard.describe_slices(), std::string(stage), comm_.rank(),
                                           hash_of(engine_.store(), (engine_.store().*view)(part))});
    }
    if (view == &ParameterStore::master && script_.inputs.plan.zero_stage < 3) add_stored(stage);
  }

  // What this rank computes with, whoever has updated it.
  void add_stored(std::string_view stage) {
    const ParameterStore& store = engine_.store();
    for (std::size_t i = 0; i < store.size(); ++i) {
      result_.evidence.replicas.push_back({store.shard(i).global_name, store.shard(i).describe_slices() + " as stored",
                                           std::string(stage), comm_.rank(), hash_of(store, store.parameter(i))});
    }
  }

  const Script& script_;
  Communicator& comm_;
  ScriptedRun& result_;
  std::mutex& mutex_;
  std::unique_ptr<Kernels> kernels_;
  Arena arena_{{.poison = true, .memory = &kernels_->memory()}};
  Engine engine_;
};

std::vector<std::uint64_t> input_hashes(const PairInputs& inputs) {
  std::vector<std::uint64_t> hashes;
  for (int data = 0; data < inputs.plan.parallel.data; ++data) {
    const Interval rows = balanced_part(inputs.plan.batch.rows, inputs.plan.parallel.data, data);
    const Batch batch = inputs.data->training_rows(0, inputs.plan.batch.rows, rows);
    hashes.push_back(hash64(std::as_bytes(std::span(batch.ids))));
  }
  return hashes;
}

void add_series(const Script& script, ScriptedRun& run) {
  std::vector<double> norms;
  std::vector<double> rates;
  for (const RankStep& step : run.steps.front()) {
    if (step.result.skipped) continue;
    run.evidence.losses.push_back(step.result.loss);
    norms.push_back(step.result.gradient_norm);
    rates.push_back(step.result.learning_rate);
  }
  const auto last = static_cast<int>(script.inputs.steps) - 1;
  const auto series = [&](std::string_view stage, const std::string& name, const std::vector<double>& values) {
    run.evidence.stages.push_back(make_stage(script.inputs, stage, last, {{name, values}}));
  };
  series(kLosses, "loss of steps that updated", run.evidence.losses);
  series(kGradientNorms, "gradient norm of steps that updated", norms);
  series("learning_rates", "learning rate of steps that updated", rates);
}

}  // namespace

// Found by its argument, outside of the unnamed namespace.
template <class Archive>
void serialize(Archive& archive, RankStep& step) {
  archive(step.step, step.result, step.scaler, step.fp8, step.updates, step.state_hash, step.stale_copies);
}

namespace {

// Where ranks are processes: what one of them has for itself, and of rank 0 what is of the whole run.
struct ProcessPart {
  std::vector<StageEvidence> stages;
  std::vector<ReplicaHash> replicas;
  RankStep start;
  std::vector<RankStep> steps;
};

template <class Archive>
void serialize(Archive& archive, ProcessPart& part) {
  archive(part.stages, part.replicas, part.start, part.steps);
}

// A script that looks into the engine writes down what it sees in this process, and one that saves wants a folder for all ranks:
// those run on threads whatever the transport.
WorldSettings world_of(const Script& script, const RunContext& context) {
  WorldSettings world = context.world;
  const bool looks_inside = script.prepare || script.before_step || script.trace || script.gradients;
  if (looks_inside || !script.load.empty() || !script.save.empty()) world.transport = "threads";
  return world;
}

void share(const WorldSettings& world, ScriptedRun& run) {
  const JobShape job = job_shape(world);
  if (job.processes == 1) return;
  const auto own = static_cast<std::size_t>(job.rank);
  ProcessPart mine{run.evidence.stages, run.evidence.replicas, {}, {}};
  if (own < run.start.size()) mine.start = run.start[own];
  if (own < run.start.size()) mine.steps = run.steps[own];
  const std::vector<std::string> parts = all_gather_bytes(world, to_bytes(mine));
  run.evidence.replicas.clear();
  for (std::size_t rank = 0; rank < run.start.size(); ++rank) {
    auto part = from_bytes<ProcessPart>(parts[rank]);
    if (rank == 0) run.evidence.stages = std::move(part.stages);
    run.evidence.replicas.insert(run.evidence.replicas.end(), part.replicas.begin(), part.replicas.end());
    run.start[rank] = std::move(part.start);
    run.steps[rank] = std::move(part.steps);
  }
}

}  // namespace

std::int64_t ScriptedRun::skipped() const { return steps.front().empty() ? 0 : steps.front().back().scaler.skipped_steps; }

ScriptedRun run_script(const Script& script, const RunContext& context, const std::string& side) {
  ScriptedRun run;
  const int ranks = script.inputs.plan.parallel.world_size();
  run.start.resize(static_cast<std::size_t>(ranks));
  run.steps.resize(static_cast<std::size_t>(ranks));
  run.evidence.side = fmt::format("engine {} {} {}", script.inputs.plan.precision, describe_layout(script.inputs.plan), side);
  run.evidence.unit_roundoff = candidate_roundoff(script.inputs.plan);
  run.evidence.ranks = ranks;
  run.evidence.input_hashes = input_hashes(script.inputs);
  std::mutex mutex;
  const WorldSettings world = world_of(script, context);
  run_world({.ranks = ranks, .deadline = kDeadline, .settings = world},
            [&](Communicator& comm) { RankScript(script, context, comm, run, mutex).run(); });
  share(world, run);
  add_series(script, run);
  return run;
}

double count_steps(const ScriptedRun& run, const std::function<bool(const RankStep&)>& bad) {
  double count = 0;
  for (const std::vector<RankStep>& rank : run.steps) {
    for (const RankStep& step : rank) count += bad(step) ? 1 : 0;
  }
  return count;
}

Property ranks_agree(const ScriptedRun& run) {
  double differing = 0;
  int first = -1;
  for (const std::vector<RankStep>& rank : run.steps) {
    for (std::size_t i = 0; i < rank.size(); ++i) {
      const RankStep& here = rank[i];
      const RankStep& leader = run.steps.front()[i];
      const bool same = here.result.skipped == leader.result.skipped && here.scaler == leader.scaler &&
                        here.updates == leader.updates && here.result.learning_rate == leader.result.learning_rate &&
                        here.result.loss_scale == leader.result.loss_scale && here.fp8 == leader.fp8;
      if (same) continue;
      ++differing;
      if (first < 0 || here.step < first) first = static_cast<int>(here.step);
    }
  }
  return {"ranks_that_differ",
          differing,
          Relation::equal,
          0.0,
          "decision, scale, counter, updates, learning rate and fp8 state of every rank and step are those of rank 0",
          first,
          ""};
}

}  // namespace tandem

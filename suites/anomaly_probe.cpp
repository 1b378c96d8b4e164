// SPDX-License-Identifier: Apache-2.0
#include "suites/anomaly_probe.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/rng.h"
#include "core/timeline.h"
#include "optimized/comm/world.h"
#include "optimized/machine.h"
#include "suites/machine_of.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kDeadline{20000};
constexpr std::uint64_t kBits = 32;

std::vector<TensorView> state_views(const ParameterStore& store, FaultTarget target) {
  std::vector<TensorView> views;
  for (const OwnedPart& part : store.parts()) {
    if (target == FaultTarget::weights) {
      views.push_back(store.master(part));
    } else {
      views.push_back(store.first_moment(part));
      views.push_back(store.second_moment(part));
    }
  }
  return views;
}

// One rank's part of a run.
class ProbeRank {
 public:
  ProbeRank(const ProbeScript& script, const RunContext& context, Communicator& comm, ProbeRun& result)
      : script_(script),
        comm_(comm),
        result_(result),
        kernels_(make_kernels(script.config.plan, machine_of(context))),
        engine_({&comm, kernels_.get(), &arena_, nullptr, context.pitfalls, {}}, options()) {
    engine_.store().initialise(script.config.model, script.config.initialization, script.config.seed);
    if (script.config.anomaly.action == AnomalyAction::off) return;
    AnomalyGuardOptions guarded;
    guarded.config = script.config;
    guarded.pitfalls = context.pitfalls;
    guard_.emplace(std::move(guarded), engine_);
  }

  void run() {
    for (std::int64_t step = 0; step < script_.config.steps; ++step) {
      one_step(step);
      if (script_.counts_not_finite) count_not_finite();
    }
    if (!guard_ || comm_.rank() != 0) return;
    result_.incidents = guard_->incidents();
    result_.guard_bytes = guard_->bytes_looked_at();
  }

  // Seconds, the guard's included.
  double one_step(std::int64_t step) {
    const Batch batch = script_.data->training_batch(step, script_.config.plan.batch.rows);
    const std::int64_t begin = Timeline::now_ns();
    if (guard_) guard_->begin_step(step, step);
    damage_state(step);
    const StepResult done = engine_.train_step(batch, step);
    if (guard_) static_cast<void>(guard_->after_step(done, static_cast<double>(Timeline::now_ns() - begin) * 1e-9, {}));
    const double seconds = static_cast<double>(Timeline::now_ns() - begin) * 1e-9;
    if (comm_.rank() == 0) result_.steps.push_back(done);
    return seconds;
  }

 private:
  EngineOptions options() {
    const RunConfig& config = script_.config;
    EngineOptions made{config.model, config.plan, config.optimizer, config.schedule, config.steps, config.seed};
    made.on_activation = [this](std::int64_t step, int layer, TensorView output) {
      if (is_due(FaultTarget::activations, step)) damage({output});
      if (guard_) guard_->see_activation(layer, output);
    };
    made.touch_gradients = [this](std::int64_t step, TensorView gradients) {
      if (is_due(FaultTarget::gradients, step)) damage({gradients});
    };
    if (config.anomaly.action != AnomalyAction::off) {
      made.gate = [this](const UpdateSigns& signs) { return guard_->before_update(signs); };
    }
    return made;
  }

  [[nodiscard]] bool is_due(FaultTarget target, std::int64_t step) const {
    return script_.upset && !is_done_ && script_.upset->target == target && script_.upset->rank == comm_.rank() &&
           script_.upset->step == step;
  }

  void damage_state(std::int64_t step) {
    for (const FaultTarget target : {FaultTarget::weights, FaultTarget::moments}) {
      if (is_due(target, step)) damage(state_views(engine_.store(), target));
    }
  }

  // An element of all that the views hold, each as likely as any other. fp32 alone.
  void damage(const std::vector<TensorView>& views) {
    CounterRng random(script_.upset->draw, "upset", 0);
    std::int64_t elements = 0;
    for (const TensorView& view : views) elements += view.num_elements();
    auto element = static_cast<std::int64_t>(random.next_below(static_cast<std::uint64_t>(elements)));
    const int bit = static_cast<int>(random.next_below(kBits));
    is_done_ = true;
    result_.bit = script_.upset->nan ? -1 : bit;
    for (const TensorView& view : views) {
      if (element >= view.num_elements()) {
        element -= view.num_elements();
        continue;
      }
      HostView struck(kernels_->memory(), view, Access::update);  // what hooks show is the host's already
      auto* const at = static_cast<float*>(struck.view().data()) + element;
      std::uint32_t bits = 0;
      std::memcpy(&bits, at, sizeof(bits));
      bits ^= std::uint32_t{1} << bit;
      if (script_.upset->nan) {
        *at = std::numeric_limits<float>::quiet_NaN();
      } else {
        std::memcpy(at, &bits, sizeof(bits));
      }
      return;
    }
  }

  void count_not_finite() {
    double bad = 0;
    double all = 0;
    for (const TensorView& view : state_views(engine_.store(), FaultTarget::weights)) {
      const HostView host(kernels_->memory(), view, Access::read);
      const auto* const values = static_cast<const float*>(host.view().data());
      for (std::int64_t i = 0; i < view.num_elements(); ++i) bad += std::isfinite(values[i]) ? 0 : 1;
      all += static_cast<double>(view.num_elements());
    }
    bad = all_reduce_sum(comm_, bad);
    all = all_reduce_sum(comm_, all);
    if (comm_.rank() == 0) result_.not_finite_share.push_back(bad / all);
  }

  const ProbeScript& script_;
  Communicator& comm_;
  ProbeRun& result_;
  std::unique_ptr<Kernels> kernels_;
  Arena arena_{{.memory = &kernels_->memory()}};
  Engine engine_;
  std::optional<AnomalyGuard> guard_;
  bool is_done_ = false;
};

}  // namespace

ProbeRun run_probe(const ProbeScript& script, const RunContext& context) {
  ProbeRun run;
  WorldSettings settings = context.world;
  settings.transport = "threads";
  run_world({.ranks = script.config.plan.parallel.world_size(), .deadline = kDeadline, .settings = settings},
            [&](Communicator& comm) { ProbeRank(script, context, comm, run).run(); });
  return run;
}

GuardTimes time_guard(const ProbeScript& script, int turns, std::int64_t steps_per_turn, const RunContext& context) {
  ProbeScript unwatched = script;
  unwatched.config.anomaly.action = AnomalyAction::off;
  GuardTimes times;
  ProbeRun thrown_away;
  // Where an engine's memory lies makes more of a difference than the guard: each of them is made first once.
  for (const bool watched_first : {false, true}) {
    run_world({.ranks = script.config.plan.parallel.world_size(), .deadline = kDeadline, .settings = context.world},
              [&](Communicator& comm) {
                ProbeRank one(watched_first ? script : unwatched, context, comm, thrown_away);
                ProbeRank other(watched_first ? unwatched : script, context, comm, thrown_away);
                const auto turn = [&](ProbeRank& rank, int number) {
                  double seconds = 0;
                  for (std::int64_t i = 0; i < steps_per_turn; ++i) seconds += rank.one_step(number * steps_per_turn + i);
                  return seconds;
                };
                for (int i = 0; i <= turns; ++i) {  // the first warms up
                  // Each goes first in every other turn.
                  const double first = turn(i % 2 == 0 ? one : other, i);
                  const double second = turn(i % 2 == 0 ? other : one, i);
                  if (i == 0 || comm.rank() != 0) continue;
                  const bool first_is_watched = watched_first == (i % 2 == 0);
                  (first_is_watched ? times.watched_seconds : times.unwatched_seconds).push_back(first);
                  (first_is_watched ? times.unwatched_seconds : times.watched_seconds).push_back(second);
                }
              });
  }
  return times;
}

}  // namespace tandem

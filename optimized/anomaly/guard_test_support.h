// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "core/config.h"
#include "core/synthetic_corpus.h"
#include "optimized/anomaly/guard.h"
#include "optimized/comm/world.h"

/// For tests: guards of several ranks around small engines.
namespace tandem::watched {

inline RunConfig tiny(const ParallelDegrees& degrees, AnomalyAction action) {
  RunConfig config;
  config.model.vocabulary = 13;
  config.model.sequence = 7;
  config.model.layers = 2;
  config.model.hidden = 8;
  config.model.heads = 2;
  config.plan.parallel = degrees;
  config.plan.batch = {4, 1};
  config.steps = 100;
  config.anomaly.action = action;
  config.anomaly.sample_every_steps = 4;
  config.anomaly.confirm_steps = 3;
  return config;
}

inline PitfallSet with(Pitfall pitfall) { return PitfallSet(std::span(&pitfall, 1)); }

/// A rank with its engine and guard, and what a trainer does with them.
class Watched {
 public:
  Watched(Communicator& comm, const RunConfig& config, const std::filesystem::path& folder, const PitfallSet& pitfalls = {},
          std::int64_t first_step = 0)
      : comm_(comm), config_(config), kernels_(make_cpu_kernels({})), engine_(context(comm), options()) {
    comm.set_timeline(&timeline_);
    AnomalyGuardOptions guard;
    guard.config = config;
    guard.folder = folder;
    guard.first_step = first_step;
    guard.data = "synthetic";
    guard.data_identity = corpus_.identity();
    guard.pitfalls = pitfalls;
    guard.read_batch = [this](std::int64_t batch) { return corpus_.training_batch(batch, config_.plan.batch.rows); };
    guard_ = std::make_unique<AnomalyGuard>(std::move(guard), engine_);
    engine_.store().initialise(config.model, Initialization::gpt2, 1);
  }

  AnomalyDecision step(std::int64_t step) {
    guard_->begin_step(step, step);
    if (before_step) before_step(step, engine_.store());
    const Batch batch = corpus_.training_batch(step, config_.plan.batch.rows);
    const std::size_t seen = timeline_.count();
    StepResult result = engine_.train_step(batch, step);
    if (result.retry) {
      EXPECT_EQ(guard_->after_step(result, 1e-3, {}), AnomalyDecision::retry);
      result = engine_.train_step(batch, step);
    }
    EXPECT_FALSE(result.retry);
    last = result;
    return guard_->after_step(result, 1e-3, timeline_.spans_from(seen));
  }

  std::function<void(std::int64_t, ParameterStore&)> before_step;
  std::function<void(std::int64_t step, TensorView)> touch_gradients;
  std::function<void(std::int64_t step, int layer, TensorView)> touch_activation;
  std::function<void(UpdateSigns&)> touch_signs;
  StepResult last;
  AnomalyGuard& guard() { return *guard_; }
  Engine& engine() { return engine_; }

 private:
  RankContext context(Communicator& comm) { return {&comm, kernels_.get(), &arena_, &timeline_, {}}; }
  EngineOptions options() {
    EngineOptions options{config_.model, config_.plan, config_.optimizer, config_.schedule, config_.steps, 1};
    options.gate = [this](const UpdateSigns& seen) {
      UpdateSigns signs = seen;
      if (touch_signs) touch_signs(signs);
      return guard_->before_update(signs);
    };
    options.on_activation = [this](std::int64_t step, int layer, TensorView values) {
      if (touch_activation) touch_activation(step, layer, values);
      guard_->see_activation(layer, values);
    };
    options.touch_gradients = [this](std::int64_t step, TensorView values) {
      if (touch_gradients) touch_gradients(step, values);
    };
    return options;
  }

  Communicator& comm_;
  RunConfig config_;
  SyntheticCorpus corpus_{{.vocabulary = 13, .sequence = 7}};
  Arena arena_{{.huge_pages = false}};
  std::unique_ptr<Kernels> kernels_;
  Timeline timeline_;
  std::unique_ptr<AnomalyGuard> guard_;
  Engine engine_;
};

inline void on_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  run_world({.ranks = ranks, .deadline = std::chrono::milliseconds(20000)}, body);
}

inline void set(TensorView values, double value) {
  if (values.dtype() == DType::f32) values.as<float>()[0] = static_cast<float>(value);
}

inline const AnomalyFinding* find(const AnomalyIncident& incident, AnomalyMonitor monitor) {
  for (const AnomalyFinding& finding : incident.findings) {
    if (finding.monitor == monitor) return &finding;
  }
  return nullptr;
}

// All that can be said about it, to compare ranks by.
inline std::string all_of(const AnomalyGuard& guard) {
  std::ostringstream text;
  for (const AnomalyIncident& incident : guard.incidents()) {
    text << incident.describe() << incident.bundle << name(incident.decision) << incident.retried << incident.repaired;
  }
  return text.str();
}

}  // namespace tandem::watched

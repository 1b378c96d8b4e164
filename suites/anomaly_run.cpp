// SPDX-License-Identifier: Apache-2.0
#include "suites/anomaly_run.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "core/synthetic_corpus.h"

namespace tandem {
namespace {

constexpr std::int64_t kVocabulary = 16;
constexpr std::int64_t kSequence = 16;

// Step s trains on batch order[s] of another source.
class ListedBatches final : public WrappedSource {
 public:
  ListedBatches(std::shared_ptr<const BatchSource> inner, std::vector<std::int64_t> order)
      : WrappedSource(*inner), inner_(std::move(inner)), order_(std::move(order)) {}

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    return inner_->training_rows(order_.at(static_cast<std::size_t>(step)), global_rows, rows);
  }

 private:
  std::shared_ptr<const BatchSource> inner_;
  std::vector<std::int64_t> order_;
};

// Few successors of each symbol: what is not of the source is as unlikely as the model has learnt it to be.
RunConfig watched_config(const WatchedVariant& variant) {
  RunConfig config;
  config.model.vocabulary = kVocabulary;
  config.model.sequence = kSequence;
  config.model.layers = 2;
  config.model.hidden = 24;
  config.model.heads = 4;
  config.plan.parallel = variant.degrees;
  config.plan.zero_stage = variant.zero_stage;
  config.plan.precision = variant.precision;
  config.plan.numerics = numerics_from_precision(variant.precision);
  config.plan.loss_scale.initial = 1024;
  config.plan.batch = {24, variant.degrees.pipeline > 1 ? 2 : 1};
  config.optimizer.learning_rate = 2e-2;
  config.schedule = {ScheduleKind::cosine, 4, 0, 0.2};
  config.steps = variant.steps;
  config.evaluate_every_steps = 0;
  config.evaluate_batches = 2;
  config.checkpoint_every_steps = 5;
  // A loss that falls spreads its window: garbage stands out by 8, not by the 12 of a long run, whatever the seed.
  config.anomaly = {variant.action, variant.retry, 16, 8, 4, 4, 3};
  return config;
}

// The gate of a run that is told what to do. What it sees is the same on all ranks, so that they may share what it remembers.
class ToldGate {
 public:
  ToldGate(const reference::PolicyOutcome& story, std::int64_t window) : window_(window) {
    for (const reference::Computation& computation : story.computations) fates_[computation.step] = computation.fate;
  }

  UpdateDecision operator()(const UpdateSigns& signs) {
    const auto told = fates_.find(signs.step);
    const Fate fate = told == fates_.end() ? Fate::applied : told->second;
    if (fate == Fate::skipped) return {UpdateDecision::Kind::skip, 1};
    const std::lock_guard lock(mutex_);
    if (fate != Fate::clipped) {
      norms_[signs.step] = signs.gradient_norm;
      return {};
    }
    std::vector<double> window;
    for (auto norm = norms_.rbegin(); norm != norms_.rend() && std::ssize(window) < window_; ++norm) {
      if (norm->first < signs.step) window.push_back(norm->second);
    }
    const double applied = signs.gradient_norm * signs.clip_coefficient;
    return {UpdateDecision::Kind::apply, std::min(1.0, reference::median_of(window) / applied)};
  }

 private:
  using Fate = reference::Computation::Fate;
  std::int64_t window_;
  std::map<std::int64_t, Fate> fates_;
  std::mutex mutex_;
  std::map<std::int64_t, double> norms_;  // by step
};

// Batches in the order of the steps; of a step that is left out, the one that it computed for nothing.
std::vector<std::int64_t> order_of(const reference::PolicyOutcome& story) {
  std::vector<std::int64_t> order = story.trained;
  for (const reference::Computation& computation : story.computations) {
    const auto step = static_cast<std::size_t>(computation.step);
    if (computation.fate == reference::Computation::Fate::skipped && order.at(step) < 0) order[step] = computation.batch;
  }
  return order;
}

double rollbacks_of(const std::vector<AnomalyIncident>& incidents) {
  double count = 0;
  for (const AnomalyIncident& incident : incidents) count += incident.decision == AnomalyDecision::roll_back ? 1 : 0;
  return count;
}

}  // namespace

WatchedScript watched_script(const WatchedVariant& variant, const RunContext& context, const std::filesystem::path& folder) {
  WatchedScript script;
  script.config = watched_config(variant);
  script.config.seed = context.seed;
  script.config.plan.threads_per_rank = context.threads_per_rank;
  script.data = std::make_shared<SyntheticCorpus>(
      SyntheticOptions{.vocabulary = kVocabulary, .branching = 2, .sequence = kSequence, .seed = context.seed});
  script.folder = folder;
  return script;
}

std::shared_ptr<FaultInjector> make_injector(const WatchedScript& script) {
  FaultInjectorOptions options;
  options.faults = script.faults;
  for (std::size_t i = 0; i < options.faults.size(); ++i) options.faults[i].id = i;
  options.in_process = true;
  options.checkpoints = script.folder;
  return std::make_shared<FaultInjector>(std::move(options));
}

TrainReport run_watched(const WatchedScript& script, const RunContext& context) {
  const std::shared_ptr<FaultInjector> injector = script.injector ? script.injector : make_injector(script);
  TrainOptions options;
  options.config = script.config;
  options.data = script.data.get();
  options.data_name = "synthetic";
  options.output = script.folder;
  options.resume = script.resume;
  options.record_timeline = script.timed;
  options.world = context.world;
  options.world.transport = "threads";
  options.pitfalls = context.pitfalls;
  options.backend = context.backend;
  options.faults = injector->empty() ? nullptr : injector.get();
  std::atomic<bool> stop = false;
  if (script.stop_after > 0) {
    options.stop = &stop;
    options.on_step = [&](std::int64_t step, const StepResult&, double) { stop = step + 1 >= script.stop_after; };
  }
  return train(options);
}

CheckpointRun told_run(const WatchedScript& script, const reference::PolicyOutcome& story, const RunContext& context) {
  CheckpointScript told;
  told.inputs.model = script.config.model;
  told.inputs.plan = script.config.plan;
  told.inputs.optimizer = script.config.optimizer;
  told.inputs.schedule = script.config.schedule;
  told.inputs.steps = script.config.steps;
  told.inputs.seed = script.config.seed;
  told.inputs.initialization = script.config.initialization;
  told.inputs.data = std::make_shared<ListedBatches>(script.data, order_of(story));
  const auto gate = std::make_shared<ToldGate>(story, script.config.anomaly.window);
  told.gate = [gate](const UpdateSigns& signs) { return (*gate)(signs); };
  RunContext plain = context;
  plain.pitfalls = {};
  return run_checkpoints(told, plain);
}

const CheckpointRun& Teller::tell(const WatchedScript& script, const reference::PolicyOutcome& story) {
  const auto known = told_.find(story.trained);
  if (known != told_.end()) return known->second;
  return told_.emplace(story.trained, told_run(script, story, context_)).first->second;
}

reference::PolicyOutcome story_of(const WatchedScript& script, const std::vector<reference::ScriptedAnomaly>& anomalies) {
  reference::PolicyRun run;
  run.policy = script.config.anomaly;
  run.steps = script.config.steps;
  run.checkpoint_every_steps = script.config.checkpoint_every_steps;
  run.anomalies = anomalies;
  return reference::follow_policy(run);
}

Property equal_to_told(const std::string& label, const WatchedScript& script, const CheckpointRun& told) {
  return equal_on_disk(fmt::format("fields_and_tensors_that_differ ({})", label), told.end,
                       step_folder(script.folder, script.config.steps),
                       "parameters, moments, counters and scale of the run that was told its batches from the start",
                       static_cast<int>(script.config.steps) - 1);
}

Property same_steps(const std::string& label, const TrainReport& report, const CheckpointRun& told) {
  const auto first = static_cast<std::ptrdiff_t>(report.first_step);
  const std::vector<StepResult> expected(told.steps.begin() + std::min(first, std::ssize(told.steps)), told.steps.end());
  return {fmt::format("steps_that_differ ({})", label),
          steps_that_differ(expected, report.steps),
          Relation::equal,
          0.0,
          "losses, norms and learning rates of the run that was told its batches from the start",
          -1,
          ""};
}

void add_course(const std::string& label, const TrainReport& report, const reference::PolicyOutcome& story,
                std::vector<Property>& properties) {
  double expected = 0;
  for (const auto& [to, count] : story.rollbacks) expected += static_cast<double>(count);
  properties.push_back(exactly(fmt::format("rollbacks ({})", label), rollbacks_of(report.incidents), expected,
                               "as often as the policy's letter says"));
  properties.push_back(exactly(fmt::format("left_out_as_told ({})", label), report.skipped_batches == story.skipped ? 1 : 0, 1,
                               fmt::format("batches [{}] and no other", fmt::join(story.skipped, ", "))));
  properties.push_back(exactly(fmt::format("gave_up ({})", label), report.gave_up ? 1 : 0, story.gave_up ? 1 : 0,
                               "the end of the run as the policy's letter says"));
}

Case anomaly_case(const std::string& name, const std::string& summary, const WatchedVariant& variant) {
  const RunConfig config = watched_config(variant);
  return property_case("anomaly", name, summary, config.model, config.plan);
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "cli/replay.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include <fmt/format.h>

#include "optimized/anomaly/bundle.h"
#include "optimized/machine.h"
#include "optimized/training/trainer.h"

namespace tandem {
namespace {

// To the bit; of NaN there is one kind.
bool same(double left, double right) {
  if (std::isnan(left) || std::isnan(right)) return std::isnan(left) && std::isnan(right);
  return std::bit_cast<std::uint64_t>(left) == std::bit_cast<std::uint64_t>(right);
}

void require_whole(const IncidentBundle& bundle, const std::string& folder) {
  if (bundle.start_step > 0 && bundle.checkpoint.empty()) {
    throw InputError(fmt::format("{}: cannot be computed again: the checkpoint of step {} was not in the run's folder then",
                                 folder, bundle.start_step));
  }
  const auto steps = static_cast<std::size_t>(bundle.step - bundle.start_step + 1);
  if (bundle.step >= bundle.start_step && bundle.losses.size() == steps && bundle.gradient_norms.size() == steps) return;
  throw InputError(fmt::format("{}: bundle.json has {} losses and {} norms for the steps {} to {}", folder, bundle.losses.size(),
                               bundle.gradient_norms.size(), bundle.start_step + 1, bundle.step + 1));
}

std::string verdict(bool has_batch, bool came_as_before, bool is_again) {
  if (!has_batch) return "cannot be told: the data has changed since, or was garbage only when it was read then";
  if (!came_as_before)
    return "other numbers already before it: the state had left its course, or another build computes otherwise";
  return is_again ? "the same numbers again: it is the data or the state" : "other numbers than recorded: it was the machine";
}

TrainOptions options_of(const IncidentBundle& bundle, const std::filesystem::path& folder) {
  TrainOptions options;
  options.config = bundle.config;
  options.config.anomaly.action = AnomalyAction::off;
  options.config.evaluate_every_steps = 0;
  options.config.evaluate_batches = 0;
  options.data_name = bundle.data;
  if (!bundle.checkpoint.empty()) options.resume = folder / bundle.checkpoint;
  options.skipped_batches = {bundle.skipped_batches.begin(), bundle.skipped_batches.end()};
  return options;
}

// Of the incident's step, last; returns the steps before it that are as recorded.
std::int64_t compare(const IncidentBundle& bundle, const std::vector<StepResult>& steps) {
  std::int64_t equal = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const bool is_last = i + 1 == bundle.losses.size();
    const bool is_equal = same(steps[i].loss, bundle.losses[i]) && same(steps[i].gradient_norm, bundle.gradient_norms[i]);
    if (!is_last && is_equal) ++equal;
    if (is_equal && !is_last) continue;
    fmt::print("step {}: recorded loss {:.9g}, norm {:.9g}; now loss {:.9g}, norm {:.9g}{}\n",
               bundle.start_step + static_cast<std::int64_t>(i) + 1, bundle.losses[i], bundle.gradient_norms[i], steps[i].loss,
               steps[i].gradient_norm, is_equal ? ": the same, bit for bit" : "");
  }
  return equal;
}

}  // namespace

int replay_incident(const TrainArguments& arguments) {
  const std::filesystem::path folder = arguments.replay;
  const IncidentBundle bundle = read_bundle(folder);
  require_whole(bundle, arguments.replay);
  const WorldSettings world = to_world_settings(arguments.world, arguments.backend);
  const Job job(world);
  DataCache cache = arguments.cache;
  TrainOptions options = options_of(bundle, folder);
  const std::unique_ptr<BatchSource> source =
      open_data(arguments.data.empty() ? bundle.data : arguments.data, options.config, cache);
  if (!bundle.data_identity.empty() && source->identity() != bundle.data_identity) {
    throw InputError(fmt::format("{}: was recorded with other data ('{}', now '{}'); give it with --data", arguments.replay,
                                 bundle.data_identity, source->identity()));
  }
  options.data = source.get();
  options.world = world;
  options.backend = arguments.backend;
  options.device = device_of(world.transport);
  // Not by fewer steps: the learning rate knows how many there will be.
  std::atomic<bool> stop{false};
  options.stop = &stop;
  options.on_step = [&](std::int64_t step, const StepResult&, double) { stop = step >= bundle.step; };
  const TrainReport report = train(options);
  if (!job.leads()) return job.agree_on_status(kGood);

  for (const std::string& finding : bundle.findings) fmt::print("recorded: {}\n", finding);
  TANDEM_CHECK(report.steps.size() == bundle.losses.size(), fmt::format("{} steps were computed", report.steps.size()));
  const std::int64_t rows = bundle.config.plan.batch.rows;
  const bool has_batch =
      bundle.batch_hash == Hash128() || hash_of(source->training_rows(bundle.batch, rows, {0, rows})) == bundle.batch_hash;
  if (!has_batch) fmt::print("batch {}: not the tokens that were recorded\n", bundle.batch);
  const std::int64_t before = bundle.step - bundle.start_step;
  const std::int64_t equal = compare(bundle, report.steps);
  fmt::print("steps before the incident: {} of {} as recorded, bit for bit\n", equal, before);
  const bool is_again = same(report.steps.back().loss, bundle.losses.back()) &&
                        same(report.steps.back().gradient_norm, bundle.gradient_norms.back());
  fmt::print("step {}, batch {}: {}\n", bundle.step + 1, bundle.batch, verdict(has_batch, equal == before, is_again));
  return job.agree_on_status(has_batch && equal == before ? kGood : kCheckFailed);
}

}  // namespace tandem

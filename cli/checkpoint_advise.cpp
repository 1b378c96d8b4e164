// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/checkpoint_command.h"
#include "cli/output.h"
#include "core/checkpoint_interval.h"
#include "harness/measurement.h"
#include "harness/text_table.h"
#include "optimized/checkpoint/timings.h"

namespace tandem {
namespace {

constexpr double kSecondsPerHour = 3600;
constexpr double kHoursPerDay = 24;

struct AdviseArguments {
  std::string folder;
  double failures_per_day = 0;
  double mtbf_hours = 0;
  int nodes = 1;
  double save_seconds = -1;
  double step_seconds = -1;
  double restart_seconds = 60;
  std::string json;
};

/// What is known of a run's checkpoints; below 0: nothing.
struct Measured {
  std::size_t checkpoints = 0;
  double save_seconds = -1;
  double background_seconds = 0;  ///< until a checkpoint is durable everywhere, after training goes on
  double step_seconds = -1;
};

Measured measured_in(const std::filesystem::path& folder) {
  std::vector<double> save, background, step;
  for (const auto& [times, step_seconds] : read_timings(folder)) {
    // At the advised interval no checkpoint waits for the one before.
    save.push_back(times.blocking_seconds - times.waiting_seconds);
    background.push_back(times.writing_seconds + times.uploading_seconds);
    step.push_back(step_seconds);
  }
  if (save.empty()) throw InputError(fmt::format("{}: no checkpoint was timed; give --save-seconds", folder.string()));
  return {save.size(), summarise(save).median, summarise(background).median, summarise(step).median};
}

Measured measured_for(const AdviseArguments& arguments) {
  Measured measured;
  if (!arguments.folder.empty() && (arguments.save_seconds < 0 || arguments.step_seconds < 0)) {
    measured = measured_in(arguments.folder);
  }
  if (arguments.save_seconds >= 0) {
    measured.save_seconds = arguments.save_seconds;
    measured.checkpoints = 0;
    measured.background_seconds = 0;
  }
  if (arguments.step_seconds >= 0) measured.step_seconds = arguments.step_seconds;
  if (measured.save_seconds < 0) throw InputError("how long is one checkpoint? name the folder of a run, or give --save-seconds");
  return measured;
}

double failure_seconds(const AdviseArguments& arguments) {
  if ((arguments.failures_per_day > 0) == (arguments.mtbf_hours > 0)) {
    throw InputError("how often does a node fail? give one of --failures-per-day and --mtbf-hours");
  }
  const double hours = arguments.mtbf_hours > 0 ? arguments.mtbf_hours : kHoursPerDay / arguments.failures_per_day;
  return hours * kSecondsPerHour / arguments.nodes;
}

struct Advice {
  std::string rule;
  double interval_seconds = 0;
  double goodput = 0;
  std::int64_t steps = 0;  ///< 0: not known
};

Advice advice_of(const std::string& rule, double interval_seconds, const CheckpointCosts& costs, const Measured& measured) {
  // A save cannot begin before the one before it is through, nor at a part of a step.
  double interval = std::max(interval_seconds, measured.background_seconds);
  std::int64_t steps = 0;
  if (measured.step_seconds > 0) {
    steps = std::max<std::int64_t>(1, std::llround(interval / measured.step_seconds));
    interval = static_cast<double>(steps) * measured.step_seconds;
  }
  return {rule, interval, goodput(costs, interval), steps};
}

std::string as_json(const CheckpointCosts& costs, const Measured& measured, const std::vector<Advice>& advices) {
  nlohmann::ordered_json json = {{"save_seconds", costs.save_seconds},        {"background_seconds", measured.background_seconds},
                                 {"timed_checkpoints", measured.checkpoints}, {"restart_seconds", costs.restart_seconds},
                                 {"failure_seconds", costs.failure_seconds},  {"step_seconds", nullptr}};
  if (measured.step_seconds > 0) json["step_seconds"] = measured.step_seconds;
  for (const Advice& advice : advices) {
    json[advice.rule] = {{"interval_seconds", advice.interval_seconds}, {"interval_steps", nullptr}, {"goodput", advice.goodput}};
    if (advice.steps > 0) json[advice.rule]["interval_steps"] = advice.steps;
  }
  return json.dump(2) + "\n";
}

void print(const CheckpointCosts& costs, const Measured& measured, const std::vector<Advice>& advices) {
  fmt::print("a checkpoint stops training for {}{}; the job fails every {}\n", human_seconds(costs.save_seconds),
             measured.checkpoints > 0 ? fmt::format(" (median of {}) and is durable {} later", measured.checkpoints,
                                                    human_seconds(measured.background_seconds))
                                      : "",
             human_seconds(costs.failure_seconds));
  for (const Advice& advice : advices) {
    fmt::print("{:<6} every {}{}: {} of the time is progress\n", advice.rule, human_seconds(advice.interval_seconds),
               advice.steps > 0 ? fmt::format(", {} step{}", advice.steps, advice.steps == 1 ? "" : "s") : "",
               human_share(advice.goodput));
  }
  if (advices.back().steps > 0) fmt::print("--set checkpoint_every_steps={}\n", advices.back().steps);
}

int advise_action(const AdviseArguments& arguments) {
  require_writable(arguments.json, "--json");
  const Measured measured = measured_for(arguments);
  // What was computed while the last checkpoint was still being written is lost with it.
  const CheckpointCosts costs = {.save_seconds = measured.save_seconds,
                                 .restart_seconds = arguments.restart_seconds + measured.background_seconds,
                                 .failure_seconds = failure_seconds(arguments)};
  const std::vector<Advice> advices = {advice_of("young", young_interval_seconds(costs), costs, measured),
                                       advice_of("daly", daly_interval_seconds(costs), costs, measured)};
  if (arguments.json != "-") print(costs, measured, advices);
  if (!arguments.json.empty()) write_output(arguments.json, as_json(costs, measured, advices));
  return kGood;
}

}  // namespace

void add_checkpoint_advise(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("advise", "How often to save, from what saving costs and how often the job fails");
  const auto arguments = std::make_shared<AdviseArguments>();
  command->add_option("DIR", arguments->folder, "folder that train --out wrote: its checkpoints were timed");
  command->add_option("--failures-per-day", arguments->failures_per_day, "of one node")->check(positive_number);
  command->add_option("--mtbf-hours", arguments->mtbf_hours, "mean time between failures of one node")->check(positive_number);
  command->add_option("--nodes", arguments->nodes, "of the job; any of them ends it")->capture_default_str()->check(at_least_one);
  command->add_option("--save-seconds", arguments->save_seconds, "that training stands still for one checkpoint")
      ->check(positive_number);
  command->add_option("--step-seconds", arguments->step_seconds, "of one step")->check(positive_number);
  command->add_option("--restart-seconds", arguments->restart_seconds, "from a failure to the first new step")
      ->capture_default_str()
      ->check(number_between(0, 1e9));
  command->add_option("--json", arguments->json, "write the advice as JSON; - is standard output");
  command->footer("Example:\n  tandem checkpoint advise --save-seconds 20 --step-seconds 4 --mtbf-hours 50000 --nodes 512");
  command->callback([&line, arguments] { line.action = [arguments] { return advise_action(*arguments); }; });
}

}  // namespace tandem

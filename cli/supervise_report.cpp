// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/supervise.h"
#include "core/checkpoint_interval.h"
#include "harness/measurement.h"
#include "optimized/checkpoint/timings.h"

namespace tandem {
namespace {

std::string_view name(SupervisorReport::End end) {
  switch (end) {
    case SupervisorReport::End::finished: return "finished";
    case SupervisorReport::End::interrupted: return "interrupted";
    case SupervisorReport::End::gave_up: return "gave up";
    case SupervisorReport::End::bad_input: return "bad input";
  }
  return "?";
}

// What theory says of a run with these costs; nothing where nothing failed or no checkpoint was timed.
struct Prediction {
  CheckpointCosts costs;
  double interval_seconds = 0;  ///< of work between two checkpoints
  double goodput = 0;
  double young_seconds = 0, daly_seconds = 0;
  double step_seconds = 0;
};

std::optional<Prediction> predict(const SupervisedRun& run) {
  const SupervisorReport& report = run.report;
  if (report.failures == 0 || report.wall_seconds <= 0 || run.checkpoint_every_steps <= 0) return std::nullopt;
  std::vector<double> save, step;
  try {
    for (const auto& [times, step_seconds] : read_timings(run.output)) {
      save.push_back(times.blocking_seconds - times.waiting_seconds);
      step.push_back(step_seconds);
    }
  } catch (const InputError&) {
    return std::nullopt;
  }
  if (save.empty()) return std::nullopt;
  Prediction result;
  result.costs.save_seconds = summarise(save).median;
  result.costs.restart_seconds = report.down_seconds / report.failures;
  result.costs.failure_seconds = report.wall_seconds / report.failures;
  result.step_seconds = summarise(step).median;
  result.interval_seconds = result.step_seconds * static_cast<double>(run.checkpoint_every_steps);
  if (result.costs.save_seconds <= 0 || result.interval_seconds <= 0) return std::nullopt;
  result.goodput = goodput(result.costs, result.interval_seconds);
  result.young_seconds = young_interval_seconds(result.costs);
  result.daly_seconds = daly_interval_seconds(result.costs);
  return result;
}

std::string plural(std::int64_t count, const char* what) { return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s"); }

nlohmann::json to_json(const Incident& incident) {
  nlohmann::json json = {{"when", incident.when},       {"kind", incident.kind},    {"what", incident.what},
                         {"rank", incident.rank},       {"step", incident.step},    {"phase", incident.phase},
                         {"attempt", incident.attempt}, {"action", incident.action}};
  if (incident.detected_after_seconds) json["detected_after_seconds"] = *incident.detected_after_seconds;
  if (incident.lost_steps) json["lost_steps"] = *incident.lost_steps;
  if (incident.seconds_to_first_new_step) json["seconds_to_first_new_step"] = *incident.seconds_to_first_new_step;
  return json;
}

}  // namespace

// Beats see steps coarsely. Of a step that was done several times, the last time counts.
void count_steps(const std::vector<StepMetrics>& steps, SupervisorReport& report) {
  if (steps.empty()) return;
  std::map<std::int64_t, double> counted;
  double all_seconds = 0;
  for (const StepMetrics& step : steps) {
    all_seconds += step.step_seconds;
    counted[step.step] = step.step_seconds;
  }
  report.useful_seconds = 0;
  for (const auto& [step, seconds] : counted) report.useful_seconds += seconds;
  report.redone_seconds = all_seconds - report.useful_seconds;
}

void print_supervised(const SupervisedRun& run) {
  const SupervisorReport& report = run.report;
  fmt::print("supervised: {}, {}, {} done again, down for {:.2f} s\n",
             plural(static_cast<std::int64_t>(report.attempts), "attempt"), plural(report.failures, "failure"),
             plural(report.lost_steps, "step"), report.down_seconds);
  fmt::print("goodput: {:.1f} % of {:.2f} s (useful {:.2f} s, done again {:.2f} s, down {:.2f} s, start and end {:.2f} s)\n",
             100 * report.goodput(), report.wall_seconds, report.useful_seconds, report.redone_seconds, report.down_seconds,
             std::max(0.0, report.wall_seconds - report.useful_seconds - report.redone_seconds - report.down_seconds));
  if (const std::optional<Prediction> theory = predict(run)) {
    fmt::print(
        "Daly's model: {:.1f} % with these costs (checkpoint {:.2g} s, restart {:.2f} s, a failure every {:.2f} s) and a "
        "checkpoint every {:.3g} s; the best interval is {:.3g} s ({}; Young: {:.3g} s)\n",
        100 * theory->goodput, theory->costs.save_seconds, theory->costs.restart_seconds, theory->costs.failure_seconds,
        theory->interval_seconds, theory->daly_seconds,
        plural(std::max<std::int64_t>(1, std::llround(theory->daly_seconds / theory->step_seconds)), "step"),
        theory->young_seconds);
  }
}

std::string supervised_json(const SupervisedRun& run) {
  const SupervisorReport& report = run.report;
  nlohmann::json json = {{"end", name(report.end)},
                         {"why", report.why},
                         {"attempts", report.attempts},
                         {"failures", report.failures},
                         {"lost_steps", report.lost_steps},
                         {"wall_seconds", report.wall_seconds},
                         {"useful_seconds", report.useful_seconds},
                         {"redone_seconds", report.redone_seconds},
                         {"down_seconds", report.down_seconds},
                         {"goodput", report.goodput()}};
  if (const std::optional<Prediction> theory = predict(run)) {
    json["daly"] = {{"goodput", theory->goodput},
                    {"save_seconds", theory->costs.save_seconds},
                    {"restart_seconds", theory->costs.restart_seconds},
                    {"failure_seconds", theory->costs.failure_seconds},
                    {"interval_seconds", theory->interval_seconds},
                    {"best_interval_seconds", theory->daly_seconds},
                    {"young_interval_seconds", theory->young_seconds}};
  }
  json["incidents"] = nlohmann::json::array();
  for (const Incident& incident : run.incidents) json["incidents"].push_back(to_json(incident));
  return json.dump(2) + "\n";
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "cli/train_report.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/measurement.h"
#include "harness/text_table.h"
#include "suites/benefits.h"
#include "suites/pair.h"

namespace tandem {
namespace {

constexpr std::size_t kWarmUpSteps = 1;

double share(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

nlohmann::json by_category(const BytesByCategory& bytes) {
  nlohmann::json json = nlohmann::json::object();
  for (std::size_t i = 0; i < kMemoryCategories; ++i) json[std::string(name(static_cast<MemoryCategory>(i)))] = bytes[i];
  return json;
}

// Of every category on the rank that has most of it.
BytesByCategory worst_peak(const std::vector<MemoryLedger>& ledgers) {
  BytesByCategory worst{};
  for (const MemoryLedger& ledger : ledgers) {
    for (std::size_t i = 0; i < kMemoryCategories; ++i) worst[i] = std::max(worst[i], ledger.peak()[i]);
  }
  return worst;
}

// Inside the steps from `first` on, of which there are `steps`. Transfers know no step.
std::array<double, kPurposes> bytes_sent_per_step(const TrainReport& report, int first, double steps) {
  std::array<double, kPurposes> sent{};
  for (const std::vector<Span>& spans : report.spans_by_rank) {
    std::vector<std::pair<std::int64_t, std::int64_t>> within;  // in ascending order
    for (const Span& span : spans) {
      if (span.activity == Activity::step && span.step >= first) within.emplace_back(span.begin_ns, span.end_ns);
    }
    for (const Span& span : spans) {
      if (span.activity != Activity::transfer) continue;
      const auto after =
          std::upper_bound(within.begin(), within.end(), std::pair(span.begin_ns, std::numeric_limits<std::int64_t>::max()));
      if (after == within.begin() || span.begin_ns > std::prev(after)->second) continue;
      sent[static_cast<std::size_t>(span.purpose)] += static_cast<double>(span.bytes) / steps;
    }
  }
  return sent;
}

nlohmann::json communication_json(const TrainSummary& summary) {
  nlohmann::json json = {{"busy_share", summary.busy_share}, {"exposed_share", summary.exposed_share}};
  for (std::size_t i = 0; i < kPurposes; ++i) {
    json["bytes_sent_per_step"][std::string(name(static_cast<Purpose>(i)))] = summary.bytes_sent[i];
  }
  return json;
}

void print_communication(const TrainSummary& summary) {
  fmt::print("communication: {:.1f} % of a step, {:.1f} % exposed; sent in a step:", 100 * summary.busy_share,
             100 * summary.exposed_share);
  std::string_view separator = " ";
  for (std::size_t i = 0; i < kPurposes; ++i) {
    if (summary.bytes_sent[i] == 0) continue;
    fmt::print("{}{} {}", separator, name(static_cast<Purpose>(i)),
               human_bytes(static_cast<std::int64_t>(summary.bytes_sent[i])));
    separator = ", ";
  }
  fmt::print("\n");
}

std::int64_t skipped_steps(const TrainReport& report) {
  return std::count_if(report.steps.begin(), report.steps.end(), [](const StepResult& step) { return step.skipped; });
}

nlohmann::json loss_scale_json(const TrainReport& report) {
  nlohmann::json json = {{"scale", nlohmann::json::array()}, {"skipped", nlohmann::json::array()}};
  for (const StepResult& step : report.steps) {
    json["scale"].push_back(step.loss_scale);
    json["skipped"].push_back(step.skipped);
  }
  return json;
}

void print_memory(const TrainSummary& summary) {
  TextTable table({"peak memory of a rank", "measured", "predicted"});
  const auto cell = [](std::int64_t bytes) { return bytes > 0 ? human_bytes(bytes) : std::string("-"); };
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    table.add({std::string(name(static_cast<MemoryCategory>(i))), human_bytes(summary.peak_bytes[i]),
               cell(summary.predicted_bytes[i])});
  }
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    if (summary.host_peak_bytes[i] == 0 && summary.host_predicted_bytes[i] == 0) continue;
    table.add({fmt::format("{}, in host memory", name(static_cast<MemoryCategory>(i))), human_bytes(summary.host_peak_bytes[i]),
               cell(summary.host_predicted_bytes[i])});
  }
  // Columns, also where a pipe or a file takes them: people read both.
  fmt::print("{}", table.render(TableStyle::terminal));
}

nlohmann::json experts_json(const TrainReport& report) {
  nlohmann::json json = {{"auxiliary_loss", nlohmann::json::array()},
                         {"kept_assignments", nlohmann::json::array()},
                         {"dropped_assignments", nlohmann::json::array()}};
  for (const StepResult& step : report.steps) {
    json["auxiliary_loss"].push_back(step.auxiliary_loss);
    json["kept_assignments"].push_back(step.kept_assignments);
    json["dropped_assignments"].push_back(step.dropped_assignments);
  }
  return json;
}

nlohmann::json checkpoints_json(const TrainReport& report) {
  nlohmann::json json = nlohmann::json::array();
  for (const CheckpointTimes& times : report.checkpoint_times) {
    json.push_back({{"step", times.step},
                    {"bytes", times.total_bytes},
                    {"blocking_seconds", times.blocking_seconds},
                    {"waiting_seconds", times.waiting_seconds},
                    {"writing_seconds", times.writing_seconds},
                    {"uploading_seconds", times.uploading_seconds}});
  }
  return json;
}

nlohmann::json incidents_json(const TrainReport& report) {
  nlohmann::json json = nlohmann::json::array();
  for (const AnomalyIncident& incident : report.incidents) {
    nlohmann::json one = {{"step", incident.step + 1}, {"what", incident.describe()}};
    if (incident.batch >= 0) one["batch"] = incident.batch;
    if (!incident.findings.empty()) one["rank"] = incident.findings.front().rank;
    if (incident.rolled_back_to) one["rolled_back_to"] = *incident.rolled_back_to;
    if (!incident.bundle.empty()) one["bundle"] = incident.bundle.string();
    json.push_back(std::move(one));
  }
  return json;
}

nlohmann::json loading_json(const PrefetchStatistics& loading) {
  return {{"batches", loading.made},
          {"making_seconds", loading.making_seconds},
          {"takes", loading.takes},
          {"waits", loading.waits},
          {"waited_seconds", loading.waited_seconds}};
}

// What training stood still for, and what went on beside it.
void print_checkpoints(const TrainReport& report) {
  if (report.checkpoint_times.empty()) return;
  CheckpointTimes sum;
  for (const CheckpointTimes& times : report.checkpoint_times) {
    sum.total_bytes += times.total_bytes;
    sum.blocking_seconds += times.blocking_seconds;
    sum.writing_seconds += times.writing_seconds;
    sum.uploading_seconds += times.uploading_seconds;
  }
  const auto count = static_cast<std::int64_t>(report.checkpoint_times.size());
  const auto mean_ms = [&](double seconds) { return 1e3 * seconds / static_cast<double>(count); };
  fmt::print("checkpoints: {} of {}; training stood still {:.1f} ms for each, {:.1f} ms to write", count,
             human_bytes(sum.total_bytes / count), mean_ms(sum.blocking_seconds), mean_ms(sum.writing_seconds));
  if (sum.uploading_seconds > 0) fmt::print(", {:.1f} ms to upload", mean_ms(sum.uploading_seconds));
  fmt::print("\n");
}

void print_loading(const TrainReport& report) {
  const PrefetchStatistics& loading = report.loading;
  if (loading.takes == 0 || report.wall_seconds <= 0) return;
  const double ranks = static_cast<double>(loading.takes) / static_cast<double>(report.steps.size());
  fmt::print("data: {:.2f} ms to make a batch; waited for {:.1f} % of the time\n",
             1e3 * loading.making_seconds / static_cast<double>(std::max<std::int64_t>(1, loading.made)),
             100 * loading.waited_seconds / (ranks * report.wall_seconds));
}

}  // namespace

TrainSummary summarise_training(const TrainReport& report, const RunConfig& config, std::int64_t sequence) {
  TrainSummary summary;
  const std::size_t first = report.steps.size() > kWarmUpSteps ? kWarmUpSteps : 0;
  double tokens = 0;
  double seconds = 0;
  std::vector<double> samples;
  for (std::size_t i = first; i < report.steps.size(); ++i) {
    tokens += static_cast<double>(report.steps[i].valid_tokens);
    seconds += report.step_seconds[i];
    samples.push_back(report.step_seconds[i]);
  }
  const double steps = static_cast<double>(samples.size());
  const Summary times = summarise(samples);
  summary.step_seconds_median = times.median;
  summary.step_seconds_p10 = times.p10;
  summary.step_seconds_p90 = times.p90;
  summary.tokens_per_second = tokens / seconds;
  summary.model_flops_per_second =
      steps * static_cast<double>(config.plan.batch.rows) * model_flops_per_row(config.model, sequence, {}) / seconds;
  for (const std::vector<Span>& spans : report.spans_by_rank) {
    const TimeSplit split = split_time(spans, static_cast<int>(report.first_step) + static_cast<int>(first), {});
    const auto ranks = static_cast<double>(report.spans_by_rank.size());
    summary.busy_share += share(split.communication_busy_ns, split.wall_ns) / ranks;
    summary.exposed_share += share(split.communication_exposed_ns, split.wall_ns) / ranks;
  }
  summary.bytes_sent = bytes_sent_per_step(report, static_cast<int>(report.first_step) + static_cast<int>(first), steps);
  summary.peak_bytes = worst_peak(report.ledgers);
  summary.host_peak_bytes = worst_peak(report.host_ledgers);
  const MemoryForecast forecast = forecast_memory(config.model, config.plan, config.optimizer.kind, sequence);
  summary.predicted_bytes = forecast.device;
  summary.host_predicted_bytes = forecast.host;
  return summary;
}

std::string train_report_json(const TrainReport& report, const TrainSummary& summary, const RunConfig& config,
                              const std::string& data) {
  nlohmann::json losses = nlohmann::json::array();
  nlohmann::json norms = nlohmann::json::array();
  for (const StepResult& step : report.steps) {
    losses.push_back(step.loss);
    norms.push_back(step.gradient_norm);
  }
  nlohmann::json validation = nlohmann::json::array();
  for (const auto& [step, loss] : report.validation_losses) validation.push_back({{"steps_done", step}, {"loss", loss}});
  nlohmann::json json = {{"schema_version", 1},
                         {"config", nlohmann::json::parse(to_json(config))},
                         {"data", data},
                         {"first_step", report.first_step},
                         {"interrupted", report.interrupted},
                         {"loss", losses},
                         {"gradient_norm", norms},
                         {"validation", validation},
                         {"step_seconds",
                          {{"median", summary.step_seconds_median},
                           {"p10", summary.step_seconds_p10},
                           {"p90", summary.step_seconds_p90},
                           {"samples", report.step_seconds}}},
                         {"warm_up_steps", kWarmUpSteps},
                         {"tokens_per_second", summary.tokens_per_second},
                         {"model_flops_per_second", summary.model_flops_per_second},
                         {"flops_convention", kFlopsConvention},
                         {"communication", communication_json(summary)},
                         {"peak_bytes", by_category(summary.peak_bytes)},
                         {"predicted_bytes", by_category(summary.predicted_bytes)},
                         {"host_peak_bytes", by_category(summary.host_peak_bytes)},
                         {"host_predicted_bytes", by_category(summary.host_predicted_bytes)},
                         {"kernels",
                          {{"backend", report.kernels.backend},
                           {"instruction_set", report.kernels.instruction_set},
                           {"matrix_library", report.kernels.matrix_library},
                           {"notes", report.kernels.notes}}}};
  if (summary.peak_flops_per_second > 0) json["peak_flops_per_second"] = summary.peak_flops_per_second;
  json["checkpoints"] = checkpoints_json(report);
  json["checkpoint_problems"] = report.checkpoint_problems;
  json["incidents"] = incidents_json(report);
  json["loading"] = loading_json(report.loading);
  if (config.model.experts > 0) json["experts"] = experts_json(report);
  if (scales_loss(config.plan)) json["loss_scale"] = loss_scale_json(report);
  return json.dump(2) + "\n";
}

void print_train_summary(const TrainReport& report, const TrainSummary& summary) {
  fmt::print("{} steps in {:.1f} s: {:.0f} tokens/s, {:.1f} GFLOP/s, step {:.1f} ms (p10 {:.1f}, p90 {:.1f})\n",
             report.steps.size(), report.wall_seconds, summary.tokens_per_second, 1e-9 * summary.model_flops_per_second,
             1e3 * summary.step_seconds_median, 1e3 * summary.step_seconds_p10, 1e3 * summary.step_seconds_p90);
  if (summary.peak_flops_per_second > 0) {
    fmt::print("{:.1f} % of the matrix peak, {:.0f} TFLOP/s as measured\n",
               100 * summary.model_flops_per_second / summary.peak_flops_per_second, 1e-12 * summary.peak_flops_per_second);
  }
  const StepResult& last = report.steps.back();
  if (const std::int64_t assignments = last.kept_assignments + last.dropped_assignments; assignments > 0) {
    fmt::print("experts: {:.1f} % of the last step's assignments dropped, auxiliary loss {:.4f}\n",
               100 * share(last.dropped_assignments, assignments), last.auxiliary_loss);
  }
  if (report.spans_by_rank.size() > 1) {
    print_communication(summary);
  }
  if (last.loss_scale != 1 || skipped_steps(report) > 0) {
    fmt::print("loss scale: {:.12g} in the last step, {} of {} steps skipped\n", last.loss_scale, skipped_steps(report),
               report.steps.size());
  }
  print_loading(report);
  print_checkpoints(report);
  print_memory(summary);
  fmt::print("kernels: {}, {}, {}\n", report.kernels.backend, report.kernels.instruction_set, report.kernels.matrix_library);
}

}  // namespace tandem

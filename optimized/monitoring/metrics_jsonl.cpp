// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/metrics_jsonl.h"

#include <cmath>
#include <fstream>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// The library writes what is not finite as null.
std::string line_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

template <class Value>
void put(Json& json, const char* name, const std::optional<Value>& value) {
  if (value) json[name] = *value;
}

Json gpu_json(const GpuSample& gpu) {
  Json json = {{"index", gpu.index}, {"name", gpu.name}};
  put(json, "temperature_celsius", gpu.temperature_celsius);
  put(json, "power_watts", gpu.power_watts);
  put(json, "power_limit_watts", gpu.power_limit_watts);
  put(json, "utilization_share", gpu.utilization_share);
  put(json, "memory_used_bytes", gpu.memory_used_bytes);
  put(json, "memory_total_bytes", gpu.memory_total_bytes);
  put(json, "corrected_ecc_errors", gpu.corrected_ecc_errors);
  put(json, "uncorrected_ecc_errors", gpu.uncorrected_ecc_errors);
  put(json, "sm_clock_hertz", gpu.sm_clock_hertz);
  put(json, "memory_clock_hertz", gpu.memory_clock_hertz);
  json["throttled_by"] = gpu.throttled_by;
  return json;
}

void put_pressure(Json& json, const std::string& name, const PressureSample& pressure) {
  put(json, (name + "_pressure_some_share").c_str(), pressure.some_share);
  put(json, (name + "_pressure_full_share").c_str(), pressure.full_share);
}

Json hardware_json(const HardwareSample& sample) {
  Json json = {{"unix_seconds", sample.unix_seconds}};
  if (!sample.gpus.empty()) {
    Json gpus = Json::array();
    for (const GpuSample& gpu : sample.gpus) gpus.push_back(gpu_json(gpu));
    json["gpus"] = std::move(gpus);
  }
  put_pressure(json, "cpu", sample.cpu_pressure);
  put_pressure(json, "memory", sample.memory_pressure);
  put_pressure(json, "io", sample.io_pressure);
  put(json, "load_1_minute", sample.load_1_minute);
  put(json, "total_memory_bytes", sample.total_memory_bytes);
  put(json, "available_memory_bytes", sample.available_memory_bytes);
  put(json, "resident_bytes", sample.resident_bytes);
  put(json, "corrected_memory_errors", sample.corrected_memory_errors);
  put(json, "uncorrected_memory_errors", sample.uncorrected_memory_errors);
  if (!sample.temperatures.empty()) {
    Json temperatures = Json::array();
    for (const TemperatureSample& one : sample.temperatures)
      temperatures.push_back({{"zone", one.zone}, {"celsius", one.celsius}});
    json["temperatures"] = std::move(temperatures);
  }
  return json;
}

// One list of the fields for both directions.
template <class Metrics, class Field>
void for_each_field(Metrics& m, const Field& field) {
  field("step", m.step);
  field("total_steps", m.total_steps);
  field("unix_seconds", m.unix_seconds);
  field("attempt", m.attempt);
  field("loss", m.loss);
  field("gradient_norm", m.gradient_norm);
  field("learning_rate", m.learning_rate);
  field("loss_scale", m.loss_scale);
  field("tokens", m.tokens);
  field("step_seconds", m.step_seconds);
  field("tokens_per_second", m.tokens_per_second);
  field("communication_share", m.communication_share);
  field("exposed_share", m.exposed_share);
  field("data_wait_share", m.data_wait_share);
  field("memory_bytes", m.memory_bytes);
  field("peak_memory_bytes", m.peak_memory_bytes);
  field("skipped_steps", m.skipped_steps);
  field("incidents", m.incidents);
  field("last_incident", m.last_incident);
}

template <class Value>
void get(const Json& json, const char* name, Value& value) {
  const Json& field = json.at(name);
  if constexpr (std::is_same_v<Value, double>) {
    value = field.is_null() ? std::numeric_limits<double>::quiet_NaN() : field.get<double>();
  } else {
    field.get_to(value);
  }
}

void read_line(const std::string& line, MetricsHistory& history) {
  const Json json = Json::parse(line);
  const std::string kind = json.at("kind").get<std::string>();
  if (kind == "incident") {
    history.incidents.emplace_back(json.at("unix_seconds").get<double>(), json.at("text").get<std::string>());
  }
  if (kind != "step") return;
  StepMetrics metrics;
  for_each_field(metrics, [&](const char* name, auto& value) { get(json, name, value); });
  if (json.contains("validation_loss")) get(json, "validation_loss", metrics.validation_loss.emplace());
  history.steps.push_back(std::move(metrics));
}

}  // namespace

std::string metrics_line(const StepMetrics& metrics, const HardwareSample* hardware) {
  Json json = {{"kind", "step"}};
  for_each_field(metrics, [&](const char* name, const auto& value) { json[name] = value; });
  put(json, "validation_loss", metrics.validation_loss);
  if (hardware != nullptr) json["hardware"] = hardware_json(*hardware);
  return line_of(json);
}

MetricsJsonl::MetricsJsonl(std::filesystem::path file) : file_(std::move(file), AppendFile::Existing::continued) {}

void MetricsJsonl::record(const StepMetrics& metrics, const HardwareSample* hardware) {
  file_.append(metrics_line(metrics, hardware) + '\n');
}

void MetricsJsonl::incident(double unix_seconds, std::string_view text) {
  file_.append(line_of({{"kind", "incident"}, {"unix_seconds", unix_seconds}, {"text", text}}) + '\n');
}

MetricsHistory read_metrics(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw IoError(fmt::format("cannot read {}", file.string()));
  MetricsHistory history;
  std::string line;
  for (std::int64_t number = 1; std::getline(stream, line); ++number) {
    if (stream.eof()) break;  // its line break is missing
    try {
      read_line(line, history);
    } catch (const nlohmann::json::exception& error) {
      throw InputError(
          fmt::format("{}, line {}: no line of metrics ({}); see docs/formats.md", file.string(), number, error.what()));
    }
  }
  if (stream.bad()) throw IoError(fmt::format("cannot read {}", file.string()));
  return history;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/incident_log.h"

#include <array>
#include <chrono>
#include <ctime>
#include <sstream>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/append_line.h"
#include "core/io/atomic_file.h"
#include "core/io/file_operations.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "incidents.jsonl";

std::string utc_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  const auto seconds = static_cast<std::time_t>(milliseconds / 1000);
  std::tm fields{};
  ::gmtime_r(&seconds, &fields);
  std::array<char, 32> text{};
  const std::size_t size = std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &fields);
  return fmt::format("{}.{:03}Z", std::string_view(text.data(), size), milliseconds % 1000);
}

std::string to_line(const Incident& incident) {
  nlohmann::ordered_json line = {
      {"when", incident.when}, {"kind", incident.kind}, {"what", incident.what}, {"attempt", incident.attempt}};
  if (incident.rank >= 0) line["rank"] = incident.rank;
  if (incident.step >= 0) line["step"] = incident.step;
  if (!incident.phase.empty()) line["phase"] = incident.phase;
  if (!incident.action.empty()) line["action"] = incident.action;
  const auto set = [&](const char* key, const auto& value) {
    if (value) line[key] = *value;
  };
  set("detected_after_seconds", incident.detected_after_seconds);
  set("lost_steps", incident.lost_steps);
  set("seconds_to_first_new_step", incident.seconds_to_first_new_step);
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Incident from_json(const nlohmann::json& line) {
  Incident incident;
  const auto get = [&](const char* key, auto& value) {
    if (line.contains(key)) line.at(key).get_to(value);
  };
  const auto get_optional = [&](const char* key, auto& value) {
    if (line.contains(key)) line.at(key).get_to(value.emplace());
  };
  line.at("when").get_to(incident.when);
  line.at("kind").get_to(incident.kind);
  line.at("what").get_to(incident.what);
  get("attempt", incident.attempt);
  get("rank", incident.rank);
  get("step", incident.step);
  get("phase", incident.phase);
  get("action", incident.action);
  get_optional("detected_after_seconds", incident.detected_after_seconds);
  get_optional("lost_steps", incident.lost_steps);
  get_optional("seconds_to_first_new_step", incident.seconds_to_first_new_step);
  return incident;
}

// Nothing for a line that ends too early: its writer was killed, or the disk was full.
std::optional<nlohmann::json> parse(const std::string& text) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    if (error.byte > text.size()) return std::nullopt;
    throw;
  }
}

}  // namespace

IncidentLog::IncidentLog(const fs::path& folder) {
  if (folder.empty()) return;
  make_folders(system_files(), folder);
  file_ = folder / kFile;
}

void IncidentLog::append(Incident incident) {
  if (file_.empty()) return;
  if (incident.when.empty()) incident.when = utc_now();
  append_line(file_, to_line(incident));
}

std::vector<Incident> read_incidents(const fs::path& folder) {
  const fs::path file = folder / kFile;
  std::istringstream lines(read_text_file(file));
  std::vector<Incident> incidents;
  std::string text;
  for (int number = 1; std::getline(lines, text); ++number) {
    if (text.empty()) continue;
    try {
      const std::optional<nlohmann::json> line = parse(text);
      if (line) incidents.push_back(from_json(*line));
    } catch (const nlohmann::json::exception& error) {
      throw InputError(fmt::format("{}, line {}: {}; remove the line", file.string(), number, error.what()));
    }
  }
  return incidents;
}

}  // namespace tandem

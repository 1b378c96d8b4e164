// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/ledger.h"

#include <span>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json_field.h"

namespace tandem {
namespace {

constexpr const char* kFormat = "tandem-anomalies";
constexpr std::int64_t kVersion = 1;

std::set<std::int64_t> steps_from(const JsonField& list) {
  std::set<std::int64_t> steps;
  for (const JsonField& step : list.elements()) {
    if (!steps.insert(step.count()).second) step.refuse(fmt::format("is {} a second time", step.count()));
  }
  return steps;
}

}  // namespace

std::optional<std::int64_t> AnomalyLedger::newest_healthy() const {
  if (healthy_steps.empty()) return std::nullopt;
  return *healthy_steps.rbegin();
}

AnomalyLedger read_anomaly_ledger(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kAnomalyLedgerName;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return {};
  const std::string file = path.string();
  const nlohmann::json parsed = parse_json_object(read_text_file(path), file);
  const JsonField root(file, parsed);
  root.require_format(kFormat, kVersion);
  AnomalyLedger ledger;
  ledger.skipped_batches = steps_from(root["skipped_batches"]);
  ledger.healthy_steps = steps_from(root["healthy_steps"]);
  for (const JsonField& entry : root["rollbacks"].elements()) {
    const std::int64_t step = entry["step"].count();
    if (!ledger.rollbacks.emplace(step, entry["times"].count()).second)
      entry["step"].refuse(fmt::format("is {} a second time", step));
  }
  ledger.incidents = root["incidents"].count();
  return ledger;
}

void write_anomaly_ledger(const std::filesystem::path& folder, const AnomalyLedger& ledger, FileOperations& files) {
  nlohmann::ordered_json rollbacks = nlohmann::ordered_json::array();
  for (const auto& [step, times] : ledger.rollbacks) rollbacks.push_back({{"step", step}, {"times", times}});
  const nlohmann::ordered_json root = {{"format", kFormat},
                                       {"version", kVersion},
                                       {"skipped_batches", ledger.skipped_batches},
                                       {"healthy_steps", ledger.healthy_steps},
                                       {"rollbacks", rollbacks},
                                       {"incidents", ledger.incidents}};
  const std::string text = root.dump(2) + "\n";
  make_folders(files, folder);
  replace_file(files, folder / kAnomalyLedgerName, std::as_bytes(std::span(text)));
}

}  // namespace tandem

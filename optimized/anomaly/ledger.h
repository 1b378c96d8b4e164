// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "core/io/file_operations.h"

namespace tandem {

/// What a run has learnt about its data and its checkpoints, and must not forget when it is restarted. In FOLDER/anomalies.json,
/// replaced as a whole before training goes on.
struct AnomalyLedger {
  std::set<std::int64_t> skipped_batches;  ///< SkipList
  std::set<std::int64_t>
      healthy_steps;  ///< checkpoints (next_step) that later steps have confirmed; those that are gone are dropped
  std::map<std::int64_t, std::int64_t> rollbacks;  ///< to each checkpoint (next_step; 0 is the beginning), how often
  std::int64_t incidents = 0;                      ///< so far: numbers their bundles

  [[nodiscard]] std::optional<std::int64_t> newest_healthy() const;
  friend bool operator==(const AnomalyLedger&, const AnomalyLedger&) = default;
};

inline constexpr const char* kAnomalyLedgerName = "anomalies.json";

/// An empty one where there is no file. Throws InputError naming file and field where it cannot be read.
[[nodiscard]] AnomalyLedger read_anomaly_ledger(const std::filesystem::path& folder);
/// Durable when it returns. Throws IoError.
void write_anomaly_ledger(const std::filesystem::path& folder, const AnomalyLedger& ledger, FileOperations& files);

}  // namespace tandem

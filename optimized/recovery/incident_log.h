// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

/// One line of FOLDER/incidents.jsonl (docs/formats.md).
struct Incident {
  std::string when = {};   ///< UTC, ISO 8601 with milliseconds; set by append() where empty
  std::string kind = {};   ///< "dead", "hung", "slow", "exit", "anomaly", "preempted", "finished", "gave_up", "resumed", ...
  std::string what = {};   ///< one line for people
  int rank = -1;           ///< -1: none alone
  std::int64_t step = -1;  ///< steps done when it happened
  std::string phase = {};
  std::uint64_t attempt = 0;
  std::string action = {};  ///< "restart", "shrink to 3 ranks", "roll back to step 40, skip batch 44", "retry", "none"
  bool said = false;        ///< whoever reads the output of the run has read `what` there already; not in the log
  std::optional<double> detected_after_seconds = {};
  std::optional<std::int64_t> lost_steps = {};           ///< done before, and done again
  std::optional<double> seconds_to_first_new_step = {};  ///< from the detection to the end of the first step of the next attempt
};

/// Appends; each line is durable when it returns. Whole lines also where several processes append.
class IncidentLog {
 public:
  /// An empty folder: nothing is kept. Makes the folder and the file. Throws IoError.
  explicit IncidentLog(const std::filesystem::path& folder);
  /// Throws IoError.
  void append(Incident incident);
  [[nodiscard]] const std::filesystem::path& file() const noexcept { return file_; }

 private:
  std::filesystem::path file_;
};

/// Throws InputError naming file and line, or the file where there is none; lines that are cut off (the writer was killed) are
/// left out.
[[nodiscard]] std::vector<Incident> read_incidents(const std::filesystem::path& folder);

}  // namespace tandem

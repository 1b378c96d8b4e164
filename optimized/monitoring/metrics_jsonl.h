// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "optimized/monitoring/append_file.h"
#include "optimized/monitoring/hardware.h"
#include "optimized/monitoring/step_metrics.h"

namespace tandem {

/// Steps and incidents as JSON lines (docs/formats.md, "Metrics"). A run that goes on appends to the file of the runs before it:
/// a step that is done again is there again, with its attempt.
class MetricsJsonl {
 public:
  /// Throws IoError where the file cannot be written.
  explicit MetricsJsonl(std::filesystem::path file);

  /// One line, with `hardware` where it is not null. Throws IoError; the file then ends with the line before.
  void record(const StepMetrics& metrics, const HardwareSample* hardware = nullptr);
  void incident(double unix_seconds, std::string_view text);
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }

 private:
  AppendFile file_;
};

/// One line of JSON without its line break. What is not finite is null; bytes that are no UTF-8 are U+FFFD.
[[nodiscard]] std::string metrics_line(const StepMetrics& metrics, const HardwareSample* hardware = nullptr);

struct MetricsHistory {
  std::vector<StepMetrics> steps;                         ///< in the order of the file; null is NaN
  std::vector<std::pair<double, std::string>> incidents;  ///< Unix seconds, text
};

/// Reads what MetricsJsonl has written, hardware aside. A last line without its line break is left out: its writer was killed, or
/// is at work. Fields and kinds of lines that are not known are passed over. Throws InputError with file and line for any other
/// line that is no JSON object of this format; IoError where the file cannot be read.
[[nodiscard]] MetricsHistory read_metrics(const std::filesystem::path& file);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "optimized/monitoring/append_file.h"
#include "optimized/monitoring/hardware.h"
#include "optimized/monitoring/step_metrics.h"

namespace tandem {

/// Writes scalars as TensorBoard reads them: a new file FOLDER/events.out.tfevents.SECONDS.HOST.PID.tandem for each writer, so
/// that a run that goes on has a file of its own in the same folder. Records and messages are in docs/formats.md ("TensorBoard
/// events").
class TensorBoardWriter {
 public:
  using Scalars = std::vector<std::pair<std::string, double>>;

  /// Makes the folder. `host` empty: this machine's name. Throws IoError.
  explicit TensorBoardWriter(const std::filesystem::path& folder, double unix_seconds, std::string host = {});

  /// The tags of docs/monitoring.md at `metrics.step`; those of `hardware` where it is not null. Throws IoError.
  void record(const StepMetrics& metrics, const HardwareSample* hardware = nullptr);
  /// One event. Where `step` does not lie behind the one before, or is the first, an event says that a session starts there: what
  /// had been shown from that step on, by this file or earlier ones, has been rolled back.
  void write(std::int64_t step, double unix_seconds, const Scalars& scalars);
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }

 private:
  AppendFile file_;
  std::optional<std::int64_t> last_step_;
};

/// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78) as TFRecord stores it: rotated right by 15 bits, plus 0xA282EAD8.
[[nodiscard]] std::uint32_t masked_crc32c(std::string_view bytes);

}  // namespace tandem

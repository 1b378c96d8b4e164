// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "optimized/monitoring/nvml.h"

namespace tandem {

/// Pressure stall information of Linux: the share of the last ten seconds in which some task, or every task, waited for the
/// resource (`avg10` of /proc/pressure/*, divided by 100).
struct PressureSample {
  std::optional<double> some_share;
  std::optional<double> full_share;
};

struct TemperatureSample {
  std::string zone;  ///< as the kernel calls it, "x86_pkg_temp"
  double celsius = 0;
};

/// What this machine's hardware is doing. Everything is optional: what the machine does not tell is empty.
struct HardwareSample {
  double unix_seconds = 0;
  std::vector<GpuSample> gpus;  ///< all of the machine, whether the run uses them or not
  PressureSample cpu_pressure, memory_pressure, io_pressure;
  std::optional<double> load_1_minute;                                     ///< tasks that run or wait to, mean over a minute
  std::optional<std::int64_t> total_memory_bytes, available_memory_bytes;  ///< of the machine
  std::optional<std::int64_t> resident_bytes;                              ///< of this process
  /// Of the machine's memory since it started (EDAC), all controllers together.
  std::optional<std::int64_t> corrected_memory_errors, uncorrected_memory_errors;
  std::vector<TemperatureSample> temperatures;  ///< of the zones that have one
};

/// Reads `root`/proc and `root`/sys (tests give a tree of their own), and the GPUs where `nvml` is not null. Never throws for
/// what is missing or cannot be understood: that field is empty.
[[nodiscard]] HardwareSample sample_hardware(const std::filesystem::path& root = "/", const Nvml* nvml = nullptr);

/// One line for people, only of what is known: "gpu0 71 °C 410 W 98 %, cpu waits 3 %, load 2.1, memory 12.0 GiB free". Trouble is
/// named: throttling, uncorrected errors of memory, pressure on memory.
[[nodiscard]] std::string describe(const HardwareSample& sample);

/// Samples on a thread of its own, so that the step never waits for a driver. The first sample is taken by the constructor.
class HardwareMonitor {
 public:
  struct Options {
    std::chrono::milliseconds interval{5000};
    std::filesystem::path root = "/";
    std::shared_ptr<const Nvml> nvml = {};  ///< null: no GPUs
  };
  explicit HardwareMonitor(Options options);
  /// Ends the thread; waits for a sample under way at most.
  ~HardwareMonitor() = default;
  HardwareMonitor(const HardwareMonitor&) = delete;
  HardwareMonitor& operator=(const HardwareMonitor&) = delete;

  /// Never null. The same object is returned until there is a newer sample.
  [[nodiscard]] std::shared_ptr<const HardwareSample> latest() const;

 private:
  void run(const std::stop_token& stop);

  Options options_;
  mutable std::mutex mutex_;
  std::condition_variable_any wake_;
  std::shared_ptr<const HardwareSample> latest_;
  std::jthread thread_;  // last: ends before what it uses
};

}  // namespace tandem

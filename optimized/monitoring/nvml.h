// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

/// One GPU by NVIDIA's management library. What the device or the driver does not tell is empty.
struct GpuSample {
  int index = 0;  ///< of the machine, by NVML's order (PCI bus); CUDA_VISIBLE_DEVICES does not change it
  std::string name = {};
  std::optional<double> temperature_celsius = {};
  std::optional<double> power_watts = {}, power_limit_watts = {};
  std::optional<double> utilization_share = {};  ///< of the last sampling period, a kernel was running
  std::optional<std::int64_t> memory_used_bytes = {}, memory_total_bytes = {};
  std::optional<std::int64_t> corrected_ecc_errors = {}, uncorrected_ecc_errors = {};  ///< since the driver was loaded
  std::optional<double> sm_clock_hertz = {}, memory_clock_hertz = {};
  /// Why the clocks are lower than they could be: "power cap", "hardware slowdown", "thermal", "thermal (hardware)", "power
  /// brake". Being idle or set to lower clocks by a person is not among them. Empty also where the driver does not tell.
  std::vector<std::string> throttled_by = {};
};

/// The functions that are used of libnvidia-ml.so.1, as its documentation declares them: every one returns 0 on success. A null
/// pointer is a function that this driver does not have; the first four must be there.
struct NvmlFunctions {
  using Device = void*;
  struct Memory {
    unsigned long long total, free, used;  // bytes
  };
  struct Utilization {
    unsigned int gpu, memory;  // per cent
  };
  int (*init)() = nullptr;                                             // nvmlInit_v2
  int (*shutdown)() = nullptr;                                         // nvmlShutdown
  int (*device_count)(unsigned int*) = nullptr;                        // nvmlDeviceGetCount_v2
  int (*device_by_index)(unsigned int, Device*) = nullptr;             // nvmlDeviceGetHandleByIndex_v2
  int (*name)(Device, char*, unsigned int) = nullptr;                  // nvmlDeviceGetName
  int (*temperature)(Device, int, unsigned int*) = nullptr;            // nvmlDeviceGetTemperature; sensor; Celsius
  int (*power)(Device, unsigned int*) = nullptr;                       // nvmlDeviceGetPowerUsage; mW
  int (*power_limit)(Device, unsigned int*) = nullptr;                 // nvmlDeviceGetEnforcedPowerLimit; mW
  int (*utilization)(Device, Utilization*) = nullptr;                  // nvmlDeviceGetUtilizationRates
  int (*memory)(Device, Memory*) = nullptr;                            // nvmlDeviceGetMemoryInfo
  int (*ecc_errors)(Device, int, int, unsigned long long*) = nullptr;  // nvmlDeviceGetTotalEccErrors; type, counter
  int (*clock)(Device, int, unsigned int*) = nullptr;                  // nvmlDeviceGetClockInfo; type; MHz
  int (*throttle_reasons)(Device, unsigned long long*) = nullptr;      // nvmlDeviceGetCurrentClocksThrottleReasons; bits
};

/// An initialised NVML. The library is found when the program runs, so that one build serves machines with and without a driver.
class Nvml {
 public:
  /// Null where the machine has no driver or it does not start; `why_not` (may be null) then says so in one line.
  [[nodiscard]] static std::shared_ptr<const Nvml> open(const std::string& library = "libnvidia-ml.so.1",
                                                        std::string* why_not = nullptr);
  /// By these functions; null as above.
  [[nodiscard]] static std::shared_ptr<const Nvml> open(const NvmlFunctions& functions, std::string* why_not = nullptr);
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml();

  [[nodiscard]] std::vector<GpuSample> sample() const;

 private:
  explicit Nvml(const NvmlFunctions& functions) : functions_(functions) {}
  [[nodiscard]] GpuSample sample_device(unsigned int index, NvmlFunctions::Device device) const;

  NvmlFunctions functions_;
  std::shared_ptr<void> library_;  // what dlopen gave; closed after shutdown
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/nvml.h"

#include <dlfcn.h>

#include <array>
#include <utility>

#include <fmt/format.h>

namespace tandem {
namespace {

// Values of NVML's enumerations.
constexpr int kGpuSensor = 0;
constexpr int kCorrected = 0, kUncorrected = 1, kSinceDriverLoaded = 0;
constexpr int kSmClock = 1, kMemoryClock = 2;

struct ThrottleReason {
  unsigned long long bit;
  const char* name;
};
constexpr std::array kThrottleReasons = {ThrottleReason{0x04, "power cap"}, ThrottleReason{0x08, "hardware slowdown"},
                                         ThrottleReason{0x20, "thermal"}, ThrottleReason{0x40, "thermal (hardware)"},
                                         ThrottleReason{0x80, "power brake"}};

template <class Function>
void find(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

NvmlFunctions find_functions(void* library) {
  NvmlFunctions f;
  find(f.init, library, "nvmlInit_v2");
  find(f.shutdown, library, "nvmlShutdown");
  find(f.device_count, library, "nvmlDeviceGetCount_v2");
  find(f.device_by_index, library, "nvmlDeviceGetHandleByIndex_v2");
  find(f.name, library, "nvmlDeviceGetName");
  find(f.temperature, library, "nvmlDeviceGetTemperature");
  find(f.power, library, "nvmlDeviceGetPowerUsage");
  find(f.power_limit, library, "nvmlDeviceGetEnforcedPowerLimit");
  find(f.utilization, library, "nvmlDeviceGetUtilizationRates");
  find(f.memory, library, "nvmlDeviceGetMemoryInfo");
  find(f.ecc_errors, library, "nvmlDeviceGetTotalEccErrors");
  find(f.clock, library, "nvmlDeviceGetClockInfo");
  find(f.throttle_reasons, library, "nvmlDeviceGetCurrentClocksThrottleReasons");
  return f;
}

void say(std::string* why_not, std::string text) {
  if (why_not != nullptr) *why_not = std::move(text);
}

// What `function` writes through its last argument, times `scale`; empty where there is no such function or it refuses.
template <class Raw, class Value, class Function, class... Fixed>
std::optional<Value> ask(Function function, NvmlFunctions::Device device, Value scale, Fixed... fixed) {
  Raw raw{};
  if (function == nullptr || function(device, fixed..., &raw) != 0) return std::nullopt;
  return static_cast<Value>(raw) * scale;
}

}  // namespace

std::shared_ptr<const Nvml> Nvml::open(const std::string& library, std::string* why_not) {
  const std::shared_ptr<void> handle(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL), [](void* opened) {
    if (opened != nullptr) ::dlclose(opened);
  });
  if (handle == nullptr) {
    say(why_not, fmt::format("no GPU driver: {} was not found", library));
    return nullptr;
  }
  std::string reason;
  const std::shared_ptr<const Nvml> opened = open(find_functions(handle.get()), &reason);
  if (opened == nullptr) {
    say(why_not, fmt::format("{}: {}", library, reason));
    return nullptr;
  }
  std::const_pointer_cast<Nvml>(opened)->library_ = handle;
  return opened;
}

std::shared_ptr<const Nvml> Nvml::open(const NvmlFunctions& f, std::string* why_not) {
  if (f.init == nullptr || f.shutdown == nullptr || f.device_count == nullptr || f.device_by_index == nullptr) {
    say(why_not, "this is not NVIDIA's management library, or one from before 2013");
    return nullptr;
  }
  if (const int status = f.init(); status != 0) {
    say(why_not, fmt::format("the driver does not start (NVML status {})", status));
    return nullptr;
  }
  return std::shared_ptr<const Nvml>(new Nvml(f));
}

Nvml::~Nvml() { functions_.shutdown(); }

GpuSample Nvml::sample_device(unsigned int index, NvmlFunctions::Device device) const {
  const NvmlFunctions& f = functions_;
  GpuSample gpu;
  gpu.index = static_cast<int>(index);
  std::array<char, 96> name{};
  if (f.name != nullptr && f.name(device, name.data(), name.size()) == 0) gpu.name = name.data();
  gpu.temperature_celsius = ask<unsigned int>(f.temperature, device, 1.0, kGpuSensor);
  gpu.power_watts = ask<unsigned int>(f.power, device, 1e-3);
  gpu.power_limit_watts = ask<unsigned int>(f.power_limit, device, 1e-3);
  gpu.corrected_ecc_errors = ask<unsigned long long>(f.ecc_errors, device, std::int64_t{1}, kCorrected, kSinceDriverLoaded);
  gpu.uncorrected_ecc_errors = ask<unsigned long long>(f.ecc_errors, device, std::int64_t{1}, kUncorrected, kSinceDriverLoaded);
  gpu.sm_clock_hertz = ask<unsigned int>(f.clock, device, 1e6, kSmClock);
  gpu.memory_clock_hertz = ask<unsigned int>(f.clock, device, 1e6, kMemoryClock);
  if (NvmlFunctions::Utilization used{}; f.utilization != nullptr && f.utilization(device, &used) == 0)
    gpu.utilization_share = used.gpu * 1e-2;
  if (NvmlFunctions::Memory memory{}; f.memory != nullptr && f.memory(device, &memory) == 0) {
    gpu.memory_used_bytes = static_cast<std::int64_t>(memory.used);
    gpu.memory_total_bytes = static_cast<std::int64_t>(memory.total);
  }
  if (unsigned long long bits = 0; f.throttle_reasons != nullptr && f.throttle_reasons(device, &bits) == 0) {
    for (const ThrottleReason& reason : kThrottleReasons)
      if ((bits & reason.bit) != 0) gpu.throttled_by.emplace_back(reason.name);
  }
  return gpu;
}

std::vector<GpuSample> Nvml::sample() const {
  unsigned int count = 0;
  if (functions_.device_count(&count) != 0) return {};
  std::vector<GpuSample> gpus;
  for (unsigned int i = 0; i < count; ++i) {
    // A device that fell off the bus is refused here: it is missing among the samples.
    NvmlFunctions::Device device = nullptr;
    if (functions_.device_by_index(i, &device) == 0) gpus.push_back(sample_device(i, device));
  }
  return gpus;
}

}  // namespace tandem

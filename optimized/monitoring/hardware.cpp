// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/hardware.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Empty where there is none, or where the kernel refuses to read it: a sensor that is switched off is a file that cannot be read,
// which the stream reports by an exception.
std::string text_of(const fs::path& file) {
  try {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  } catch (const std::ios_base::failure&) {
    return {};
  }
}

// The number that `text` begins with, spaces before it aside.
template <class Number>
std::optional<Number> leading_number(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

// The number behind `key`, which begins a line or follows a space.
template <class Number>
std::optional<Number> number_behind(std::string_view text, std::string_view key) {
  for (std::size_t at = text.find(key); at != std::string_view::npos; at = text.find(key, at + 1)) {
    if (at == 0 || text[at - 1] == '\n' || text[at - 1] == ' ') return leading_number<Number>(text.substr(at + key.size()));
  }
  return std::nullopt;
}

std::string_view line_of(std::string_view text, std::string_view beginning) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (line.starts_with(beginning)) return line;
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  return {};
}

PressureSample read_pressure(const fs::path& file) {
  const std::string text = text_of(file);
  const auto share = [&](std::string_view kind) {
    std::optional<double> percent = number_behind<double>(line_of(text, kind), "avg10=");
    if (percent) *percent *= 1e-2;
    return percent;
  };
  return {.some_share = share("some "), .full_share = share("full ")};
}

// "MemAvailable:   24065432 kB"
std::optional<std::int64_t> kibibytes(std::string_view text, std::string_view key) {
  std::optional<std::int64_t> bytes = number_behind<std::int64_t>(text, key);
  if (bytes) *bytes *= 1024;
  return bytes;
}

// In order of their names, for a sample that does not depend on the file system.
std::vector<fs::path> folders_in(const fs::path& folder, std::string_view beginning) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with(beginning)) found.push_back(entry->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<TemperatureSample> read_temperatures(const fs::path& folder) {
  std::vector<TemperatureSample> temperatures;
  for (const fs::path& zone : folders_in(folder, "thermal_zone")) {
    const std::optional<double> milli_celsius = leading_number<double>(text_of(zone / "temp"));
    if (!milli_celsius) continue;
    const std::string type = text_of(zone / "type");
    temperatures.push_back({type.substr(0, type.find('\n')), *milli_celsius * 1e-3});
  }
  return temperatures;
}

std::optional<std::int64_t> sum_of_counts(const std::vector<fs::path>& controllers, const char* file) {
  std::optional<std::int64_t> sum;
  for (const fs::path& controller : controllers) {
    if (const auto count = leading_number<std::int64_t>(text_of(controller / file))) sum = sum.value_or(0) + *count;
  }
  return sum;
}

std::string describe_gpu(const GpuSample& gpu) {
  std::string text = fmt::format("gpu{}", gpu.index);
  if (gpu.temperature_celsius) text += fmt::format(" {:.0f} °C", *gpu.temperature_celsius);
  if (gpu.power_watts) text += fmt::format(" {:.0f} W", *gpu.power_watts);
  if (gpu.utilization_share) text += fmt::format(" {:.0f} %", 100 * *gpu.utilization_share);
  if (gpu.memory_used_bytes && gpu.memory_total_bytes) {
    text += fmt::format(" {:.1f}/{:.1f} GiB", static_cast<double>(*gpu.memory_used_bytes) / (1 << 30),
                        static_cast<double>(*gpu.memory_total_bytes) / (1 << 30));
  }
  if (!gpu.throttled_by.empty()) text += fmt::format(" THROTTLED: {}", fmt::join(gpu.throttled_by, ", "));
  if (gpu.uncorrected_ecc_errors.value_or(0) > 0) text += fmt::format(" {} UNCORRECTED ECC ERRORS", *gpu.uncorrected_ecc_errors);
  return text;
}

}  // namespace

HardwareSample sample_hardware(const fs::path& root, const Nvml* nvml) {
  HardwareSample sample;
  sample.unix_seconds = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  if (nvml != nullptr) sample.gpus = nvml->sample();
  const fs::path proc = root / "proc";
  sample.cpu_pressure = read_pressure(proc / "pressure/cpu");
  sample.memory_pressure = read_pressure(proc / "pressure/memory");
  sample.io_pressure = read_pressure(proc / "pressure/io");
  sample.load_1_minute = leading_number<double>(text_of(proc / "loadavg"));
  const std::string memory = text_of(proc / "meminfo");
  sample.total_memory_bytes = kibibytes(memory, "MemTotal:");
  sample.available_memory_bytes = kibibytes(memory, "MemAvailable:");
  sample.resident_bytes = kibibytes(text_of(proc / "self/status"), "VmRSS:");
  const std::vector<fs::path> controllers = folders_in(root / "sys/devices/system/edac/mc", "mc");
  sample.corrected_memory_errors = sum_of_counts(controllers, "ce_count");
  sample.uncorrected_memory_errors = sum_of_counts(controllers, "ue_count");
  sample.temperatures = read_temperatures(root / "sys/class/thermal");
  return sample;
}

std::string describe(const HardwareSample& sample) {
  std::vector<std::string> parts;
  for (const GpuSample& gpu : sample.gpus) parts.push_back(describe_gpu(gpu));
  if (sample.cpu_pressure.some_share) parts.push_back(fmt::format("cpu waits {:.0f} %", 100 * *sample.cpu_pressure.some_share));
  if (sample.load_1_minute) parts.push_back(fmt::format("load {:.1f}", *sample.load_1_minute));
  if (sample.available_memory_bytes) {
    parts.push_back(fmt::format("memory {:.1f} GiB free", static_cast<double>(*sample.available_memory_bytes) / (1 << 30)));
  }
  if (sample.resident_bytes)
    parts.push_back(fmt::format("used {:.2f} GiB", static_cast<double>(*sample.resident_bytes) / (1 << 30)));
  if (sample.memory_pressure.full_share.value_or(0) >= 0.01)
    parts.push_back(fmt::format("MEMORY SHORT {:.0f} %", 100 * *sample.memory_pressure.full_share));
  if (sample.io_pressure.full_share.value_or(0) >= 0.1)
    parts.push_back(fmt::format("disk waits {:.0f} %", 100 * *sample.io_pressure.full_share));
  const auto hottest =
      std::max_element(sample.temperatures.begin(), sample.temperatures.end(),
                       [](const TemperatureSample& a, const TemperatureSample& b) { return a.celsius < b.celsius; });
  if (hottest != sample.temperatures.end()) parts.push_back(fmt::format("{:.0f} °C {}", hottest->celsius, hottest->zone));
  if (sample.uncorrected_memory_errors.value_or(0) > 0)
    parts.push_back(fmt::format("{} UNCORRECTED MEMORY ERRORS", *sample.uncorrected_memory_errors));
  return fmt::format("{}", fmt::join(parts, ", "));
}

HardwareMonitor::HardwareMonitor(Options options)
    : options_(std::move(options)),
      latest_(std::make_shared<const HardwareSample>(sample_hardware(options_.root, options_.nvml.get()))),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

std::shared_ptr<const HardwareSample> HardwareMonitor::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

void HardwareMonitor::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    wake_.wait_for(lock, stop, options_.interval, [] { return false; });
    if (stop.stop_requested()) return;
    lock.unlock();
    auto sample = std::make_shared<const HardwareSample>(sample_hardware(options_.root, options_.nvml.get()));
    lock.lock();
    latest_ = std::move(sample);
  }
}

}  // namespace tandem

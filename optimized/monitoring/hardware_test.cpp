// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/hardware.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/io/test_folder.h"

namespace tandem {
namespace {

class Tree : public TestFolder {
 public:
  void put(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((path() / name).parent_path());
    write(name, text);
  }
};

TEST(Hardware, ReadsPressureMemoryErrorsAndTemperatures) {
  const Tree tree;
  tree.put("proc/pressure/cpu",
           "some avg10=12.50 avg60=1.29 avg300=1.97 total=27\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
  tree.put("proc/pressure/memory",
           "some avg10=4.00 avg60=9.00 avg300=9.00 total=1\nfull avg10=3.00 avg60=9.00 avg300=9.00 total=1\n");
  tree.put("proc/pressure/io", "some avg10=1.50 avg60=9.00 avg300=9.00 total=1\n");
  tree.put("proc/loadavg", "2.35 1.80 1.50 3/450 12345\n");
  tree.put("proc/meminfo", "MemTotal:       24689152 kB\nMemFree:          100000 kB\nMemAvailable:   12582912 kB\n");
  tree.put("proc/self/status", "Name:\ttandem\nVmHWM:\t  900000 kB\nVmRSS:\t  524288 kB\n");
  tree.put("sys/devices/system/edac/mc/mc0/ce_count", "5\n");
  tree.put("sys/devices/system/edac/mc/mc0/ue_count", "0\n");
  tree.put("sys/devices/system/edac/mc/mc1/ce_count", "2\n");
  tree.put("sys/class/thermal/thermal_zone0/type", "acpitz\n");
  tree.put("sys/class/thermal/thermal_zone0/temp", "27800\n");
  tree.put("sys/class/thermal/thermal_zone1/type", "x86_pkg_temp\n");
  tree.put("sys/class/thermal/thermal_zone1/temp", "81500\n");

  const HardwareSample sample = sample_hardware(tree.path());

  EXPECT_EQ(sample.cpu_pressure.some_share, 0.125);
  EXPECT_EQ(sample.cpu_pressure.full_share, 0.0);
  EXPECT_EQ(sample.memory_pressure.full_share, 0.03);
  EXPECT_EQ(sample.io_pressure.some_share, 0.015);
  EXPECT_FALSE(sample.io_pressure.full_share);
  EXPECT_EQ(sample.load_1_minute, 2.35);
  EXPECT_EQ(sample.total_memory_bytes, std::int64_t{24689152} * 1024);
  EXPECT_EQ(sample.available_memory_bytes, std::int64_t{12} << 30);
  EXPECT_EQ(sample.resident_bytes, std::int64_t{1} << 29);
  EXPECT_EQ(sample.corrected_memory_errors, 7);
  EXPECT_EQ(sample.uncorrected_memory_errors, 0);
  ASSERT_EQ(sample.temperatures.size(), 2U);
  EXPECT_EQ(sample.temperatures[1].zone, "x86_pkg_temp");
  EXPECT_DOUBLE_EQ(sample.temperatures[1].celsius, 81.5);
  EXPECT_EQ(describe(sample),
            "cpu waits 12 %, load 2.4, memory 12.0 GiB free, used 0.50 GiB, MEMORY SHORT 3 %, 82 °C x86_pkg_temp");
}

TEST(Hardware, LeavesOutWhatIsMissingOrMakesNoSense) {
  const Tree tree;
  const HardwareSample nothing = sample_hardware(tree.path());
  EXPECT_FALSE(nothing.cpu_pressure.some_share || nothing.load_1_minute || nothing.total_memory_bytes || nothing.resident_bytes);
  EXPECT_FALSE(nothing.corrected_memory_errors);
  EXPECT_TRUE(nothing.gpus.empty() && nothing.temperatures.empty());
  EXPECT_EQ(describe(nothing), "");

  tree.put("proc/pressure/cpu", "some\n");
  tree.put("proc/loadavg", "busy\n");
  tree.put("proc/meminfo", "MemAvailableNot: 5 kB\nMemTotal: much\n");
  // A sensor that cannot be read, and one without a name.
  std::filesystem::create_directories(tree.path() / "sys/class/thermal/thermal_zone0/temp");
  tree.put("sys/class/thermal/thermal_zone1/temp", "40000\n");

  const HardwareSample nonsense = sample_hardware(tree.path());

  EXPECT_FALSE(nonsense.cpu_pressure.some_share || nonsense.load_1_minute || nonsense.total_memory_bytes);
  EXPECT_FALSE(nonsense.available_memory_bytes);
  ASSERT_EQ(nonsense.temperatures.size(), 1U);
  EXPECT_EQ(nonsense.temperatures[0].celsius, 40);
}

TEST(Hardware, KnowsThisMachine) {
  const HardwareSample sample = sample_hardware();

  ASSERT_TRUE(sample.resident_bytes && sample.total_memory_bytes);
  EXPECT_GT(*sample.resident_bytes, 100'000);
  EXPECT_LT(*sample.resident_bytes, *sample.total_memory_bytes);
}

// Two GPUs: one that tells everything, one of which only the handle can be had. A third fell off the bus.
int ends = 0;
NvmlFunctions::Device handle(unsigned int index) { return reinterpret_cast<NvmlFunctions::Device>(std::uintptr_t{index + 100}); }
bool knows(NvmlFunctions::Device device) { return device == handle(0); }

NvmlFunctions fake_driver() {
  NvmlFunctions f;
  f.init = [] { return 0; };
  f.shutdown = [] { return ++ends, 0; };
  f.device_count = [](unsigned int* count) { return *count = 3, 0; };
  f.device_by_index = [](unsigned int index, NvmlFunctions::Device* device) {
    return *device = handle(index), index == 1 ? 15 : 0;
  };
  f.name = [](NvmlFunctions::Device d, char* text, unsigned int size) {
    return std::strncpy(text, "H200", size), knows(d) ? 0 : 3;
  };
  f.temperature = [](NvmlFunctions::Device d, int sensor, unsigned int* celsius) {
    return *celsius = 71, knows(d) && sensor == 0 ? 0 : 3;
  };
  f.power = [](NvmlFunctions::Device d, unsigned int* milliwatts) { return *milliwatts = 412500, knows(d) ? 0 : 3; };
  f.power_limit = [](NvmlFunctions::Device d, unsigned int* milliwatts) { return *milliwatts = 700000, knows(d) ? 0 : 3; };
  f.utilization = [](NvmlFunctions::Device d, NvmlFunctions::Utilization* used) { return *used = {98, 40}, knows(d) ? 0 : 3; };
  f.memory = [](NvmlFunctions::Device d, NvmlFunctions::Memory* m) {
    return *m = {128ULL << 30, 32ULL << 30, 96ULL << 30}, knows(d) ? 0 : 3;
  };
  f.ecc_errors = [](NvmlFunctions::Device d, int type, int counter, unsigned long long* errors) {
    return *errors = type == 0 ? 12 : 1, knows(d) && counter == 0 ? 0 : 3;
  };
  f.clock = [](NvmlFunctions::Device d, int type, unsigned int* megahertz) {
    return *megahertz = type == 1 ? 1980 : 3201, knows(d) && (type == 1 || type == 2) ? 0 : 3;
  };
  // Idle and clocks set by a person are no trouble, the power cap and the hardware's own thermal limit are.
  f.throttle_reasons = [](NvmlFunctions::Device d, unsigned long long* bits) { return *bits = 0x47, knows(d) ? 0 : 3; };
  return f;
}

TEST(Nvml, DecodesWhatTheDriverTells) {
  ends = 0;
  {
    const std::shared_ptr<const Nvml> nvml = Nvml::open(fake_driver());
    ASSERT_NE(nvml, nullptr);
    const HardwareSample sample = sample_hardware("/nowhere", nvml.get());

    ASSERT_EQ(sample.gpus.size(), 2U);
    const GpuSample& gpu = sample.gpus[0];
    EXPECT_EQ(gpu.name, "H200");
    EXPECT_EQ(gpu.temperature_celsius, 71);
    EXPECT_EQ(gpu.power_watts, 412.5);
    EXPECT_EQ(gpu.power_limit_watts, 700);
    EXPECT_EQ(gpu.utilization_share, 0.98);
    EXPECT_EQ(gpu.memory_total_bytes, std::int64_t{128} << 30);
    EXPECT_EQ(gpu.memory_used_bytes, std::int64_t{96} << 30);
    EXPECT_EQ(gpu.corrected_ecc_errors, 12);
    EXPECT_EQ(gpu.uncorrected_ecc_errors, 1);
    EXPECT_EQ(gpu.sm_clock_hertz, 1.98e9);
    EXPECT_EQ(gpu.memory_clock_hertz, 3.201e9);
    EXPECT_EQ(gpu.throttled_by, (std::vector<std::string>{"power cap", "thermal (hardware)"}));
    EXPECT_EQ(sample.gpus[1].index, 2);
    EXPECT_FALSE(sample.gpus[1].temperature_celsius || sample.gpus[1].memory_used_bytes || sample.gpus[1].corrected_ecc_errors);
    EXPECT_EQ(describe(sample),
              "gpu0 71 °C 412 W 98 % 96.0/128.0 GiB THROTTLED: power cap, thermal (hardware) 1 UNCORRECTED ECC ERRORS, gpu2");
    EXPECT_EQ(ends, 0);
  }
  EXPECT_EQ(ends, 1);
}

TEST(Nvml, WorksWithADriverThatLacksFunctions) {
  NvmlFunctions f = fake_driver();
  f.power = nullptr;
  f.utilization = nullptr;
  f.throttle_reasons = nullptr;

  const std::vector<GpuSample> gpus = Nvml::open(f)->sample();

  ASSERT_EQ(gpus.size(), 2U);
  EXPECT_FALSE(gpus[0].power_watts || gpus[0].utilization_share);
  EXPECT_TRUE(gpus[0].throttled_by.empty());
  EXPECT_EQ(gpus[0].temperature_celsius, 71);
}

TEST(Nvml, SaysWhyThereIsNone) {
  std::string why;
  EXPECT_EQ(Nvml::open("libnothing-of-the-kind.so.1", &why), nullptr);
  EXPECT_EQ(why, "no GPU driver: libnothing-of-the-kind.so.1 was not found");
  EXPECT_EQ(Nvml::open("libc.so.6", &why), nullptr);
  EXPECT_NE(why.find("libc.so.6: this is not NVIDIA's"), std::string::npos) << why;
  NvmlFunctions broken = fake_driver();
  broken.init = [] { return 9; };
  EXPECT_EQ(Nvml::open(broken, &why), nullptr);
  EXPECT_NE(why.find("status 9"), std::string::npos) << why;
}

TEST(HardwareMonitor, TakesNewSamplesOnItsOwnThread) {
  const Tree tree;
  tree.put("proc/loadavg", "1.5\n");
  const HardwareMonitor monitor({.interval = std::chrono::milliseconds(1), .root = tree.path()});
  const std::shared_ptr<const HardwareSample> first = monitor.latest();
  ASSERT_EQ(first->load_1_minute, 1.5);

  tree.put("proc/new", "4.5\n");
  std::filesystem::rename(tree / "proc/new", tree / "proc/loadavg");
  while (monitor.latest()->load_1_minute != 4.5) std::this_thread::yield();

  EXPECT_EQ(first->load_1_minute, 1.5);
}

TEST(HardwareMonitor, EndsWithoutWaitingForItsInterval) {
  const Tree tree;
  const HardwareMonitor monitor({.interval = std::chrono::hours(24), .root = tree.path()});

  EXPECT_NE(monitor.latest(), nullptr);
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <system_error>

#include <fmt/format.h>

#include "core/usable_cores.h"
#include "optimized/monitoring/nvml.h"
#include "optimized/probe/probe.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// The first line of a file; empty where there is none.
std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// What follows "KEY : " in a file of such lines.
std::string value_of(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || !line.starts_with(key)) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    paths.push_back(entry->path());
  }
  std::ranges::sort(paths);
  return paths;
}

// "eth0 25000 Mb/s", "mlx5_0 400 Gb/sec (4X NDR)"; a speed that the driver does not tell is left out.
std::vector<std::string> network_devices(const fs::path& root) {
  std::vector<std::string> devices;
  for (const fs::path& path : entries(root / "sys/class/net")) {
    if (path.filename() == "lo") continue;
    const std::string speed = first_line(path / "speed");
    const bool known = !speed.empty() && speed.front() != '-';
    devices.push_back(path.filename().string() + (known ? fmt::format(" {} Mb/s", speed) : ""));
  }
  for (const fs::path& path : entries(root / "sys/class/infiniband")) {
    const std::string rate = first_line(path / "ports/1/rate");
    devices.push_back(path.filename().string() + (rate.empty() ? "" : " " + rate));
  }
  return devices;
}

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  const auto nvml = Nvml::open();
  if (nvml == nullptr) return names;
  for (const GpuSample& gpu : nvml->sample()) {
    const double bytes = static_cast<double>(gpu.memory_total_bytes.value_or(0));
    names.push_back(bytes > 0 ? fmt::format("{}, {:.0f} GiB", gpu.name, bytes / (1U << 30)) : gpu.name);
  }
  return names;
}

}  // namespace

NodeInventory node_inventory(const fs::path& root) {
  NodeInventory node;
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) == 0) node.host = host.data();
  node.cpu = value_of(root / "proc/cpuinfo", "model name");
  node.cores = std::max<int>(1, static_cast<int>(available_cores().size()));
  node.memory_bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  node.gpus = gpu_names();
  node.nics = network_devices(root);
  node.driver = value_of(root / "proc/driver/nvidia/version", "NVRM version");
  utsname names{};
  if (uname(&names) == 0) node.kernel = fmt::format("{} {}", names.sysname, names.release);
  return node;
}

}  // namespace tandem

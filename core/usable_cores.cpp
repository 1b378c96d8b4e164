// SPDX-License-Identifier: Apache-2.0
#include "core/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <limits>
#include <string>
#include <system_error>
#include <thread>

#include <fmt/format.h>

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

int cores_by_affinity() {
  const auto cores = static_cast<int>(available_cores().size());
  return cores > 0 ? cores : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

// Version 2: "max 100000", or microseconds of CPU time in each period of so many.
double quota_of(const fs::path& group) {
  std::ifstream file(group / "cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period && quota > 0 && period > 0 ? quota / period : kUnlimited;
}

// Version 1: -1 where there is none.
double old_quota_of(const fs::path& group) {
  double quota = 0, period = 0;
  std::ifstream(group / "cpu.cfs_quota_us") >> quota;
  std::ifstream(group / "cpu.cfs_period_us") >> period;
  return quota > 0 && period > 0 ? quota / period : kUnlimited;
}

// The least of a group and of all that it is in. A container may see its own group as the root: what is above is not there then.
template <class Quota>
double least_quota(const fs::path& mounted, const std::string& group, const Quota& quota) {
  double least = quota(mounted);
  fs::path below = mounted;
  for (const fs::path& part : fs::path(group).relative_path()) {
    below /= part;
    least = std::min(least, quota(below));
  }
  return least;
}

double cores_by_quota(const fs::path& root) {
  const fs::path mounted = root / "sys/fs/cgroup";
  double least = kUnlimited;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/a/b", or "4:cpu,cpuacct:/a/b"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1)),
                      group = line.substr(second + 1);
    if (controllers == ",,") {
      for (const fs::path& place : {mounted, mounted / "unified"}) least = std::min(least, least_quota(place, group, quota_of));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      for (const fs::path& place : {mounted / "cpu", mounted / "cpu,cpuacct"})
        least = std::min(least, least_quota(place, group, old_quota_of));
    }
  }
  return least;
}

}  // namespace

std::vector<int> available_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &set)) cores.push_back(core);
  }
  return cores;
}

int usable_cores(const fs::path& root) {
  const int cores = cores_by_affinity();
  const double quota = cores_by_quota(root);
  return quota < cores ? std::max(1, static_cast<int>(quota)) : cores;
}

}  // namespace tandem

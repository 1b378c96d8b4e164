// SPDX-License-Identifier: Apache-2.0
#include "harness/other_load.h"

#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace tandem {
namespace {

double cpu_seconds(int who) {
  rusage usage{};
  getrusage(who, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

double cpu_seconds_of_others() {
  // "cpu user nice system idle iowait irq softirq steal ...": ticks of all cores since the start; guests are part of user.
  std::ifstream file("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, soft_irq = 0, steal = 0;
  if (!(file >> name >> user >> nice >> system >> idle >> waiting >> irq >> soft_irq >> steal)) return 0;
  const double busy = (user + nice + system + irq + soft_irq + steal) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return busy - cpu_seconds(RUSAGE_SELF) - cpu_seconds(RUSAGE_CHILDREN);
}

}  // namespace tandem

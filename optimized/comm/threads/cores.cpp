// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/cores.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include "core/batch.h"

namespace tandem {
namespace {

bool bind_to_cores(const std::vector<int>& cores) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(static_cast<std::size_t>(core), &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;
#else
  return cores.empty();
#endif
}

}  // namespace

std::vector<int> available_cores() {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &set)) cores.push_back(core);
  }
#endif
  return cores;
}

std::vector<int> share_of_cores(const std::vector<int>& cores, int ranks, int rank) {
  const int count = static_cast<int>(cores.size());
  if (ranks == 1 || count == 0) return {};
  if (count >= ranks) {
    const Interval share = balanced_part(count, ranks, rank);
    return {cores.begin() + share.begin, cores.begin() + share.end};
  }
  if (ranks % count != 0) return {};
  return {cores[static_cast<std::size_t>(rank % count)]};
}

CoreBinding::CoreBinding(const std::vector<int>& cores) {
  if (cores.empty()) return;
  std::vector<int> before = available_cores();
  if (bind_to_cores(cores)) before_ = std::move(before);
}

CoreBinding::~CoreBinding() {
  if (!before_.empty()) (void)bind_to_cores(before_);
}

}  // namespace tandem

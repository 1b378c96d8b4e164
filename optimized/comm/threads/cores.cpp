// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/cores.h"

#include <sched.h>

#include <cstddef>
#include <utility>

#include "core/batch.h"
#include "core/usable_cores.h"

namespace tandem {
namespace {

bool bind_to_cores(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(static_cast<std::size_t>(core), &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

}  // namespace

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

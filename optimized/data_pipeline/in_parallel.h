// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <future>
#include <vector>

#include "core/batch.h"
#include "core/usable_cores.h"

namespace tandem {

/// Calls `work` with parts that make up [0, count), in as many threads as this process has cores, but none with fewer than
/// `least_per_thread`. Throws what one of them threw, after all have ended.
inline void in_parallel(std::int64_t count, std::int64_t least_per_thread, const std::function<void(Interval)>& work) {
  static const std::int64_t cores = usable_cores();
  const std::int64_t parts = std::clamp<std::int64_t>(count / least_per_thread, 1, cores);
  std::vector<std::future<void>> others;
  for (std::int64_t i = 1; i < parts; ++i) {
    others.push_back(std::async(std::launch::async, work, balanced_part(count, parts, i)));
  }
  work(balanced_part(count, parts, 0));
  for (std::future<void>& other : others) other.get();
}

}  // namespace tandem

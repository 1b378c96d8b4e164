// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "optimized/comm/communicator.h"

namespace tandem::comm_test {

using namespace std::chrono_literals;

inline void run_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  run_threads_world({.ranks = ranks, .deadline = 30000ms}, body);
}

inline std::string ranks_name(const testing::TestParamInfo<int>& info) { return "Ranks" + std::to_string(info.param); }

/// Small integers that differ by rank and by index: every sum of a few of them is exact, and swapped ranks or shifted elements
/// show.
inline std::int64_t value_at(int rank, std::int64_t index) { return (rank + 1) * 1000 + (index * 7 + rank * rank * 13) % 911; }

template <class T>
std::vector<T> values_of(int rank, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = static_cast<T>(value_at(rank, i));
  return values;
}

template <class T>
TensorView flat_view(std::vector<T>& values) {
  return TensorView(values.data(), dtype_of<T>, {static_cast<std::int64_t>(values.size())});
}

inline std::int64_t total_of(const std::vector<std::int64_t>& counts) {
  std::int64_t total = 0;
  for (const std::int64_t count : counts) total += count;
  return total;
}

}  // namespace tandem::comm_test

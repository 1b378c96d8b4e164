// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "optimized/comm/world.h"

namespace tandem::comm_test {

using namespace std::chrono_literals;

/// How the ranks of a test reach each other.
enum class Way : std::uint8_t { shared_memory, messages };

inline WorldSettings settings_of(Way way) {
  WorldSettings settings;
  if (way == Way::messages) settings.link = read_link_profile("unshaped");
  return settings;
}

inline void run_ranks(int ranks, Way way, const std::function<void(Communicator&)>& body) {
  run_world({.ranks = ranks, .deadline = 30000ms, .settings = settings_of(way)}, body);
}

/// In shared memory.
inline void run_ranks(int ranks, const std::function<void(Communicator&)>& body) { run_ranks(ranks, Way::shared_memory, body); }

inline std::string ranks_name(const testing::TestParamInfo<int>& info) { return "Ranks" + std::to_string(info.param); }

using Param = std::tuple<Way, int>;

/// A test on so many ranks, over both ways.
class OnRanks : public testing::TestWithParam<Param> {
 protected:
  [[nodiscard]] static Way way() { return std::get<Way>(GetParam()); }
  [[nodiscard]] static int ranks() { return std::get<int>(GetParam()); }
  [[nodiscard]] static WorldSettings settings() { return settings_of(way()); }
  static void run_ranks(int ranks, const std::function<void(Communicator&)>& body) { comm_test::run_ranks(ranks, way(), body); }
};

inline const auto kBothWays = testing::Values(Way::shared_memory, Way::messages);

inline std::string param_name(const testing::TestParamInfo<Param>& info) {
  const bool shared = std::get<Way>(info.param) == Way::shared_memory;
  return (shared ? "SharedMemory" : "Messages") + std::to_string(std::get<int>(info.param)) + "Ranks";
}

/// Runs `call` and returns the text of the exception of type E that it must throw.
template <class E, class Call>
std::string text_of(const Call& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& other) {
    ADD_FAILURE() << "another exception: " << other.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

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

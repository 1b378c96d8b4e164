// SPDX-License-Identifier: Apache-2.0
// Time of a blocking all-reduce of fp32 on the threads transport.
//
//   comm_bench RANKS REPETITIONS fresh|reused [link=PROFILE] [algorithm=NAME] BYTES...
//
// One JSON line per size; with a link also what the alpha-beta model expects. Before each timed call every rank writes its buffer
// (fresh), as a backward pass would, or leaves it as the last call did (reused), and a barrier lines the ranks up. The clock
// covers the call; the time of a repetition is that of the slowest rank, and every result is checked. ci/peers/mpi_allreduce.cpp
// does the same with MPI.
//
// Not Google Benchmark: the number of repetitions must be the same on all ranks, and a repetition is the maximum of several
// clocks.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/comm/world.h"
#include "optimized/memory/arena.h"

namespace tandem {
namespace {

using Seconds = std::chrono::duration<double>;

struct Settings {
  int ranks = 2;
  int repetitions = 11;
  bool fresh = true;
  WorldSettings world{};
  std::vector<std::int64_t> sizes_bytes;
};

constexpr int kWarmUps = 3;

float value_of(int rank, int repetition) { return static_cast<float>(rank + 1 + repetition % 5); }

// Durations of this rank, one per repetition.
std::vector<double> measure_rank(Communicator& comm, const Settings& settings, std::int64_t bytes) {
  Arena arena;
  const std::int64_t elements = bytes / 4;
  const Arena::Buffer buffer = arena.allocate(DType::f32, {elements}, MemoryCategory::gradients);
  const TensorView data = buffer.view(DType::f32, {elements});
  const std::span<float> values = data.as<float>();
  std::ranges::fill(values, 0.0F);
  std::vector<double> seconds;
  for (int repetition = -kWarmUps; repetition < settings.repetitions; ++repetition) {
    if (settings.fresh) std::ranges::fill(values, value_of(comm.rank(), repetition + kWarmUps));
    comm.barrier();
    const auto begin = std::chrono::steady_clock::now();
    all_reduce(comm, data, {.name = "bench"});
    const auto end = std::chrono::steady_clock::now();
    comm.barrier();  // or a rank that checks would hold back the clock of another on the same core
    if (repetition >= 0) seconds.push_back(Seconds(end - begin).count());
    float expected = 0;
    for (int rank = 0; settings.fresh && rank < comm.size(); ++rank) expected += value_of(rank, repetition + kWarmUps);
    TANDEM_CHECK(std::ranges::all_of(values, [&](float value) { return value == expected; }), "a sum is wrong");
  }
  return seconds;
}

void measure(const Settings& settings, std::int64_t bytes) {
  std::vector<std::vector<double>> seconds(static_cast<std::size_t>(settings.ranks));
  run_world({.ranks = settings.ranks, .settings = settings.world},
            [&](Communicator& comm) { seconds[static_cast<std::size_t>(comm.rank())] = measure_rank(comm, settings, bytes); });
  std::vector<double> slowest = seconds[0];
  for (const auto& of_rank : seconds) {
    for (std::size_t i = 0; i < slowest.size(); ++i) slowest[i] = std::max(slowest[i], of_rank[i]);
  }
  std::ranges::sort(slowest);
  const auto quantile = [&](double share) {
    return slowest[static_cast<std::size_t>(share * static_cast<double>(slowest.size() - 1))];
  };
  const double algorithm_gigabytes_per_second = static_cast<double>(bytes) / quantile(0.5) / 1e9;
  std::string line = fmt::format(
      "\"transport\": \"{}\", \"ranks\": {}, \"bytes\": {}, \"buffers\": \"{}\", \"repetitions\": {}, \"median_us\": {:.1f}, "
      "\"p10_us\": {:.1f}, \"p90_us\": {:.1f}, \"algbw_gigabytes_per_second\": {:.3f}, \"busbw_gigabytes_per_second\": {:.3f}",
      settings.world.describe(), settings.ranks, bytes, settings.fresh ? "fresh" : "reused", settings.repetitions,
      quantile(0.5) * 1e6, quantile(0.1) * 1e6, quantile(0.9) * 1e6, algorithm_gigabytes_per_second,
      algorithm_gigabytes_per_second * 2 * (settings.ranks - 1) / settings.ranks);
  if (settings.world.link && settings.world.link->is_shaped()) {
    const double expected =
        expected_seconds(settings.world.algorithm, CollectiveKind::all_reduce, bytes, settings.ranks, *settings.world.link);
    line += fmt::format(", \"expected_us\": {:.1f}, \"median_over_expected\": {:.4f}", expected * 1e6, quantile(0.5) / expected);
  }
  fmt::print("{{{}}}\n", line);
  std::fflush(stdout);
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  if (argc < 5) {
    fmt::print(stderr, "usage: comm_bench RANKS REPETITIONS fresh|reused [link=PROFILE] [algorithm=NAME] BYTES...\n");
    return 2;
  }
  try {
    tandem::Settings settings;
    settings.ranks = std::stoi(argv[1]);
    settings.repetitions = std::stoi(argv[2]);
    settings.fresh = std::string_view(argv[3]) == "fresh";
    for (int i = 4; i < argc; ++i) {
      const std::string argument = argv[i];
      if (argument.starts_with("link=")) {
        settings.world.link = tandem::parse_link(argument.substr(5));
      } else if (argument.starts_with("algorithm=")) {
        const auto algorithm = tandem::find_algorithm(argument.substr(10));
        if (!algorithm) throw tandem::InputError(argument + ": unknown");
        settings.world.algorithm = *algorithm;
      } else {
        tandem::measure(settings, std::stoll(argument));
      }
    }
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "comm_bench: {}\n", error.what());
    return 1;
  }
}

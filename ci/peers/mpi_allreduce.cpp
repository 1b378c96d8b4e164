// SPDX-License-Identifier: Apache-2.0
// Time of MPI_Allreduce of floats, measured as optimized/collectives/collectives_bench.cpp measures ours.
//
//   mpirun -np RANKS mpi_allreduce REPETITIONS fresh|reused in_place|two_buffers BYTES...
//
// One JSON line per size. Buffers are aligned to huge pages and ask for them, as those of the other side.
#include <mpi.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int kWarmUps = 3;

struct Free {
  void operator()(float* data) const { std::free(data); }
};
using Floats = std::unique_ptr<float, Free>;

Floats allocate(std::size_t count) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const std::size_t bytes = (count * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage;
  auto* data = static_cast<float*>(std::aligned_alloc(kHugePage, bytes));
  if (data == nullptr) MPI_Abort(MPI_COMM_WORLD, 1);
  madvise(data, bytes, MADV_HUGEPAGE);
  std::fill(data, data + count, 0.0F);
  return Floats(data);
}

float value_of(int rank, int repetition) { return static_cast<float>(rank + 1 + repetition % 5); }

struct Run {
  int rank = 0;
  int ranks = 1;
  int repetitions = 11;
  bool fresh = true;
  bool in_place = true;
};

std::vector<double> measure_rank(const Run& run, std::size_t count) {
  const Floats input = allocate(count);
  const Floats second = run.in_place ? Floats() : allocate(count);
  float* const output = run.in_place ? input.get() : second.get();
  std::vector<double> seconds;
  for (int repetition = 0; repetition < run.repetitions + kWarmUps; ++repetition) {
    if (run.fresh) std::fill(input.get(), input.get() + count, value_of(run.rank, repetition));
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    MPI_Allreduce(run.in_place ? MPI_IN_PLACE : input.get(), output, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    const double end = MPI_Wtime();
    MPI_Barrier(MPI_COMM_WORLD);
    if (repetition >= kWarmUps) seconds.push_back(end - begin);
    float expected = 0;
    for (int rank = 0; run.fresh && rank < run.ranks; ++rank) expected += value_of(rank, repetition);
    if (!std::all_of(output, output + count, [&](float value) { return value == expected; })) {
      std::fprintf(stderr, "rank %d: a sum is wrong\n", run.rank);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
  return seconds;
}

void report(const Run& run, std::size_t bytes, std::vector<double> slowest) {
  std::sort(slowest.begin(), slowest.end());
  const auto quantile = [&](double share) {
    return slowest[static_cast<std::size_t>(share * static_cast<double>(slowest.size() - 1))];
  };
  const double algorithm_bandwidth = static_cast<double>(bytes) / quantile(0.5) / 1e9;
  std::printf(
      "{\"transport\": \"mpi\", \"ranks\": %d, \"bytes\": %zu, \"buffers\": \"%s\", \"repetitions\": %d, \"median_us\": %.1f, "
      "\"p10_us\": %.1f, \"p90_us\": %.1f, \"algbw_gigabytes_per_second\": %.3f, \"busbw_gigabytes_per_second\": %.3f}\n",
      run.ranks, bytes, run.fresh ? "fresh" : "reused", run.repetitions, quantile(0.5) * 1e6, quantile(0.1) * 1e6,
      quantile(0.9) * 1e6, algorithm_bandwidth, algorithm_bandwidth * 2 * (run.ranks - 1) / run.ranks);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  Run run;
  MPI_Comm_rank(MPI_COMM_WORLD, &run.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &run.ranks);
  if (argc < 5) {
    if (run.rank == 0) std::fprintf(stderr, "usage: mpi_allreduce REPETITIONS fresh|reused in_place|two_buffers BYTES...\n");
    MPI_Finalize();
    return 2;
  }
  run.repetitions = std::stoi(argv[1]);
  run.fresh = std::string(argv[2]) == "fresh";
  run.in_place = std::string(argv[3]) == "in_place";
  for (int i = 4; i < argc; ++i) {
    const std::size_t bytes = std::stoull(argv[i]);
    const std::vector<double> seconds = measure_rank(run, bytes / sizeof(float));
    std::vector<double> slowest(seconds.size());
    MPI_Reduce(seconds.data(), slowest.data(), static_cast<int>(seconds.size()), MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (run.rank == 0) report(run, bytes, slowest);
  }
  MPI_Finalize();
  return 0;
}

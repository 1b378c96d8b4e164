// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/kernels.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

/// Shortest of the repetitions that fit in `budget`, at least three; the first call of the body is not counted.
template <class Body>
double best_seconds(std::chrono::duration<double> budget, Body body) {
  body();
  double best = 1e30;
  const auto begin = Clock::now();
  for (int i = 0; i < 3 || Clock::now() - begin < budget; ++i) {
    const auto start = Clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

double matmul_peak(int threads) {
  const auto kernels = make_cpu_kernels({.threads = threads});
  double peak = 0;
  for (const auto& [rows, out, in] : {std::array<std::int64_t, 3>{1024, 1024, 1024}, {1024, 3072, 768}}) {
    std::vector<float> x(static_cast<std::size_t>(rows * in), 0.5F), w(static_cast<std::size_t>(in * out), 0.25F);
    std::vector<float> y(static_cast<std::size_t>(rows * out));
    const double seconds = best_seconds(std::chrono::milliseconds(200), [&] {
      kernels->linear_forward(view_of(x, {rows, in}), view_of(w, {in, out}), {}, view_of(y, {rows, out}));
    });
    peak = std::max(peak, 2.0 * static_cast<double>(rows * out * in) / seconds);
  }
  return peak;
}

/// a = b + s c: three streams of 96 MiB each. The bytes counted are those of the program; a cache that fetches a line
/// before it is overwritten moves a third more.
double memory_peak(int threads) {
  constexpr std::int64_t kCount = std::int64_t{24} << 20, kGrain = 1 << 16;
  std::vector<float> a(kCount), b(kCount, 1.0F), c(kCount, 2.0F);
  const double seconds = best_seconds(std::chrono::milliseconds(250), [&] {
    cpu::parallel_pieces(threads, kCount, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i)
        a[static_cast<std::size_t>(i)] = b[static_cast<std::size_t>(i)] + 3.0F * c[static_cast<std::size_t>(i)];
    });
  });
  return 3.0 * sizeof(float) * kCount / seconds;
}

}  // namespace

MeasuredPeaks measure_peaks(int threads) { return {matmul_peak(threads), memory_peak(threads)}; }

}  // namespace tandem

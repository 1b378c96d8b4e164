// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>

#include "kernels/cpu/huge_buffer.h"
#include "kernels/cpu/worker_pool.h"
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
    const cpu::HugeBuffer x(static_cast<std::size_t>(rows * in), 0.5F), w(static_cast<std::size_t>(in * out), 0.25F);
    const cpu::HugeBuffer y(static_cast<std::size_t>(rows * out), 0.0F);
    const double seconds = best_seconds(std::chrono::milliseconds(200), [&] {
      kernels->linear_forward(TensorView(x.data(), DType::f32, {rows, in}), TensorView(w.data(), DType::f32, {in, out}), {},
                              TensorView(y.data(), DType::f32, {rows, out}));
    });
    peak = std::max(peak, 2.0 * static_cast<double>(rows * out * in) / seconds);
  }
  return peak;
}

/// Best of a = b + s c and a = a + s b on arrays of 96 MiB each. The bytes counted are those of the program: the first also
/// fetches each line that it overwrites, which the second does not waste.
double memory_peak(int threads) {
  constexpr std::int64_t kCount = std::int64_t{24} << 20, kGrain = 1 << 16;
  cpu::WorkerPool pool(threads);
  const cpu::HugeBuffer a(kCount, 0.0F), b(kCount, 1.0F), c(kCount, 2.0F);
  const auto bytes_per_second = [&](const float* first, const float* second) {
    const double seconds = best_seconds(std::chrono::milliseconds(200), [&] {
      pool.run_pieces(kCount, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
        float* const out = a.data();
#pragma omp simd
        for (std::int64_t i = begin; i < end; ++i) out[i] = first[i] + 3.0F * second[i];
      });
    });
    return 3.0 * sizeof(float) * kCount / seconds;
  };
  return std::max(bytes_per_second(b.data(), c.data()), bytes_per_second(a.data(), b.data()));
}

}  // namespace

MeasuredPeaks measure_peaks(int threads) { return {matmul_peak(threads), memory_peak(threads)}; }

}  // namespace tandem

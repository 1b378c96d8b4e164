// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>

#include "kernels/cpu/cpu_products.h"
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

/// A matrix of fp32 or bf16 for measuring, all of its elements `value`, which bf16 holds exactly.
class TensorMemory {
 public:
  TensorMemory(DType dtype, std::array<std::int64_t, 2> shape, double value)
      : memory_(static_cast<std::size_t>(shape[0] * shape[1]), 0.0F), view_(memory_.data(), dtype, {shape[0], shape[1]}) {
    const auto wide = static_cast<float>(value);
    if (dtype == DType::f32) {
      std::ranges::fill(memory_.span(), wide);
    } else {
      std::fill_n(static_cast<std::uint16_t*>(view_.data()), view_.num_elements(), to_bf16_bits(wide));
    }
  }
  [[nodiscard]] const TensorView& view() const { return view_; }

 private:
  cpu::HugeBuffer memory_;
  TensorView view_;
};

double matmul_peak(Kernels& kernels, DType dtype) {
  double peak = 0;
  for (const auto& [rows, out, in] : {std::array<std::int64_t, 3>{1024, 1024, 1024}, {1024, 3072, 768}}) {
    const TensorMemory x(dtype, {rows, in}, 0.5), w(dtype, {in, out}, 0.25), y(dtype, {rows, out}, 0.0);
    const double seconds =
        best_seconds(std::chrono::milliseconds(200), [&] { kernels.linear_forward(x.view(), w.view(), {}, y.view()); });
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

MeasuredPeaks measure_peaks(int threads) {
  MeasuredPeaks peaks;
  {
    const auto kernels = make_cpu_kernels({.threads = threads});
    peaks.fp32_matmul_flops_per_second = matmul_peak(*kernels, DType::f32);
    // Converted to fp32, bf16 has no peak of its own.
    const bool converted = kernels->info().bf16_products == cpu::kConvertedProducts;
    if (!converted) peaks.bf16_matmul_flops_per_second = matmul_peak(*kernels, DType::bf16);
  }
  peaks.memory_bytes_per_second = memory_peak(threads);
  return peaks;
}

}  // namespace tandem

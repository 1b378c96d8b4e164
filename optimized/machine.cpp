// SPDX-License-Identifier: Apache-2.0
#include "optimized/machine.h"

#include <algorithm>
#include <thread>

namespace tandem {

std::unique_ptr<Kernels> make_kernels(const TrainingPlan& plan, const PitfallSet& pitfalls) {
  CpuKernelsOptions options;
  options.threads = plan.threads_per_rank;
  options.pitfalls = pitfalls;
  if (plan.numerics.autocast()) options.products = plan.numerics.compute;
  return make_cpu_kernels(options);
}

KernelsInfo machine_kernels() { return make_cpu_kernels({})->info(); }

std::vector<double> matrix_peaks_by_threads() {
  const int cores = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 8);
  std::vector<double> peaks;
  for (int threads = 1; threads <= cores; ++threads) peaks.push_back(measure_peaks(threads).fp32_matmul_flops_per_second);
  return peaks;
}

}  // namespace tandem

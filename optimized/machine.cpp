// SPDX-License-Identifier: Apache-2.0
#include "optimized/machine.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/usable_cores.h"
#include "optimized/comm/nccl/nccl_world.h"

namespace tandem {
namespace {

std::unique_ptr<Kernels> kernels_of_this_program(const TrainingPlan& plan, const MachineChoice& choice) {
  const DType products = plan.numerics.autocast() ? plan.numerics.compute : DType::f32;
  if (choice.backend == "cpu") {
    return make_cpu_kernels({.threads = plan.threads_per_rank, .pitfalls = choice.pitfalls, .products = products});
  }
  require_backend(choice.backend);
  return make_cuda_kernels(
      choice.backend,
      {.device = choice.device, .pitfalls = choice.pitfalls, .products = products, .fuse_gelu = choice.fuse_gelu});
}

}  // namespace

std::unique_ptr<Kernels> make_kernels(const TrainingPlan& plan, const MachineChoice& choice) {
  std::unique_ptr<Kernels> kernels = kernels_of_this_program(plan, choice);
  if (!choice.own_parts || !choice.own_parts->kernels) return kernels;
  std::unique_ptr<Kernels> own = choice.own_parts->kernels(std::move(kernels));
  TANDEM_CHECK(own != nullptr, fmt::format("own parts '{}' made no kernels", choice.own_parts->name));
  return own;
}

std::unique_ptr<Kernels> make_kernels(const TrainingPlan& plan, const PitfallSet& pitfalls) {
  return make_kernels(plan, MachineChoice{.pitfalls = pitfalls});
}

void require_backend(const std::string& backend) {
  if (backend == "cpu") return;
  const std::string why = why_no_gpu(backend);
  if (why.empty()) return;
  const bool is_unknown = backend != "cuda" && backend != "simt";
  const char* const other = backend == "cuda" ? "; --backend simt emulates one, to check numerics"
                            : is_unknown      ? ", and cpu without one"
                                              : "";
  throw InputError(fmt::format("--backend {}: {}{}", backend, why, other));
}

int device_of(const std::string& transport) { return transport == "nccl" ? nccl_device() : 0; }

KernelsInfo machine_kernels(const MachineChoice& choice) { return make_kernels({}, choice)->info(); }

std::vector<double> matrix_peaks_by_threads() {
  const int cores = std::min(usable_cores(), 8);
  std::vector<double> peaks;
  for (int threads = 1; threads <= cores; ++threads) peaks.push_back(measure_peaks(threads).fp32_matmul_flops_per_second);
  return peaks;
}

std::optional<GpuPeaks> measure_gpus(const std::string& backend, const std::string& transport) {
  if (backend != "cuda") return std::nullopt;
  const MeasuredPeaks peaks = measure_gpu_peaks(backend, device_of(transport));
  const int gpus = transport == "nccl" ? nccl_gpus() : 1;
  return GpuPeaks{peaks.fp32_matmul_flops_per_second, peaks.bf16_matmul_flops_per_second, gpus};
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "core/timeline.h"
#include "kernels/gpu_device.h"
#include "kernels/kernels.h"

// The two builds of the folder, for kernels/make_cuda_kernels.cpp: what each of them defines in its namespace.
namespace tandem::cuda_gpu {
[[nodiscard]] std::string why_none();
[[nodiscard]] std::unique_ptr<Kernels> make_kernels(const CudaKernelsOptions& options);
[[nodiscard]] GpuDevice describe(int device);
[[nodiscard]] std::unique_ptr<SpanObserver> make_nvtx_observer();
}  // namespace tandem::cuda_gpu
namespace tandem::simt_gpu {
[[nodiscard]] std::string why_none();
[[nodiscard]] std::unique_ptr<Kernels> make_kernels(const CudaKernelsOptions& options);
[[nodiscard]] GpuDevice describe(int device);
}  // namespace tandem::simt_gpu

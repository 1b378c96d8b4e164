// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"
#include "kernels/cuda/backends.h"
#include "kernels/kernels.h"

namespace tandem {

std::string why_no_gpu(const std::string& backend) {
  if (backend == "cuda") {
#ifdef TANDEM_WITH_CUDA
    return cuda_gpu::why_none();
#else
    return "this build has no CUDA backend (no nvcc was found)";
#endif
  }
  if (backend == "simt") {
#ifdef TANDEM_WITH_SIMT
    return simt_gpu::why_none();
#else
    return "this build has no emulated GPU (libboost-context-dev was not found)";
#endif
  }
  return fmt::format("there is no GPU backend '{}'; there are cuda and simt", backend);
}

std::unique_ptr<Kernels> make_cuda_kernels(const std::string& backend, const CudaKernelsOptions& options) {
  if (const std::string why = why_no_gpu(backend); !why.empty()) throw InputError(fmt::format("--backend {}: {}", backend, why));
#ifdef TANDEM_WITH_CUDA
  if (backend == "cuda") return cuda_gpu::make_kernels(options);
#endif
#ifdef TANDEM_WITH_SIMT
  if (backend == "simt") return simt_gpu::make_kernels(options);
#endif
  static_cast<void>(options);
  throw InputError(fmt::format("--backend {}: not in this build", backend));
}

GpuDevice describe_gpu(const std::string& backend, int device) {
  if (const std::string why = why_no_gpu(backend); !why.empty()) throw InputError(fmt::format("--backend {}: {}", backend, why));
#ifdef TANDEM_WITH_CUDA
  if (backend == "cuda") return cuda_gpu::describe(device);
#endif
#ifdef TANDEM_WITH_SIMT
  if (backend == "simt") return simt_gpu::describe(device);
#endif
  static_cast<void>(device);
  throw InputError(fmt::format("--backend {}: not in this build", backend));
}

std::unique_ptr<SpanObserver> make_nvtx_observer() {
#ifdef TANDEM_WITH_CUDA
  return cuda_gpu::make_nvtx_observer();
#else
  return nullptr;
#endif
}

}  // namespace tandem

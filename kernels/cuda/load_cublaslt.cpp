// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/load_cublaslt.h"

#include <dlfcn.h>

#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"

namespace tandem::cuda_gpu {
namespace {

// The toolkit's folder when this was built; the last place that is looked at.
#ifndef TANDEM_CUDA_LIBRARY_FOLDER
#define TANDEM_CUDA_LIBRARY_FOLDER "/usr/local/cuda/lib64"
#endif

// The names of what this was built against first: the structures are those of its headers.
std::vector<std::string> candidates() {
  const std::string own = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
  return {own, fmt::format("{}/{}", TANDEM_CUDA_LIBRARY_FOLDER, own), "libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
}

template <class Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw InputError(fmt::format("cuBLASLt has no function {}: it is too old for this program", name));
}

CublasLt load() {
  void* library = nullptr;
  for (const std::string& name : candidates()) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr) {
    throw InputError(
        fmt::format("cuBLASLt was not found ({}); put its folder into LD_LIBRARY_PATH", fmt::join(candidates(), ", ")));
  }
  CublasLt table;
  look_up(library, "cublasLtCreate", table.create);
  look_up(library, "cublasLtDestroy", table.destroy);
  look_up(library, "cublasLtGetVersion", table.get_version);
  look_up(library, "cublasLtGetStatusName", table.get_status_name);
  look_up(library, "cublasLtMatmul", table.matmul);
  look_up(library, "cublasLtMatmulAlgoConfigGetAttribute", table.algo_config);
  look_up(library, "cublasLtMatmulAlgoGetHeuristic", table.heuristic);
  look_up(library, "cublasLtMatmulDescCreate", table.create_description);
  look_up(library, "cublasLtMatmulDescDestroy", table.destroy_description);
  look_up(library, "cublasLtMatmulDescSetAttribute", table.set_description);
  look_up(library, "cublasLtMatmulPreferenceCreate", table.create_preference);
  look_up(library, "cublasLtMatmulPreferenceDestroy", table.destroy_preference);
  look_up(library, "cublasLtMatmulPreferenceSetAttribute", table.set_preference);
  look_up(library, "cublasLtMatrixLayoutCreate", table.create_layout);
  look_up(library, "cublasLtMatrixLayoutDestroy", table.destroy_layout);
  return table;
}

}  // namespace

std::string CublasLt::version() const {
  const std::size_t number = get_version();
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

void CublasLt::check(cublasStatus_t status, const char* function) const {
  if (status != CUBLAS_STATUS_SUCCESS) throw GpuError(fmt::format("{}: {}", function, get_status_name(status)));
}

const CublasLt& cublaslt() {
  static const CublasLt table = load();
  return table;
}

}  // namespace tandem::cuda_gpu

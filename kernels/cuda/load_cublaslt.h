// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <cublasLt.h>

namespace tandem::cuda_gpu {

/// What is used of cuBLASLt, looked up when the program runs: the library is larger than everything else together, and a machine
/// without a GPU does not have it. Loaded by the first call and kept until the process ends.
struct CublasLt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtGetVersion) get_version = nullptr;
  decltype(&cublasLtGetStatusName) get_status_name = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_config = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) create_description = nullptr;
  decltype(&cublasLtMatmulDescDestroy) destroy_description = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_description = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) create_layout = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout = nullptr;

  /// "13.1.0"
  [[nodiscard]] std::string version() const;
  /// Throws GpuError, naming the function and the status.
  void check(cublasStatus_t status, const char* function) const;
};

/// Throws InputError where the library is not found, naming what was tried.
[[nodiscard]] const CublasLt& cublaslt();

}  // namespace tandem::cuda_gpu

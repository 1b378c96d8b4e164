// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace tandem {

/// What a GPU says of itself.
struct GpuDevice {
  std::string name;  ///< "NVIDIA H200"
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0, l2_bytes = 0;
};

/// Of those that CUDA_VISIBLE_DEVICES leaves. Throws InputError where this build or machine has no such backend, ContractError of
/// a device that there is not.
[[nodiscard]] GpuDevice describe_gpu(const std::string& backend, int device);

}  // namespace tandem

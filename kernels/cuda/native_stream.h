// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "kernels/cuda/gpu.h"
#include "kernels/memory.h"

/// Lanes for libraries that take a stream themselves. A file outside of this folder that includes this is of the CUDA side.
namespace tandem::TANDEM_GPU {

/// A lane of its own on the device. Throws GpuError where there is no such device.
[[nodiscard]] std::unique_ptr<Memory> make_lane(int device);
/// The stream of a lane of this backend, which becomes the calling thread's device; null where the memory is another one's.
[[nodiscard]] StreamHandle native_stream(Memory& lane);

}  // namespace tandem::TANDEM_GPU

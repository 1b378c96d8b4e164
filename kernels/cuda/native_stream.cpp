// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/native_stream.h"

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/device_memory.h"

namespace tandem::TANDEM_GPU {

std::unique_ptr<Memory> make_lane(int device) {
  const std::vector<DeviceInfo> known = devices();
  if (device < 0 || device >= static_cast<int>(known.size())) {
    throw GpuError(fmt::format("there is no device {}: there are {}", device, known.size()));
  }
  return std::make_unique<DeviceMemory>(known[static_cast<std::size_t>(device)]);
}

StreamHandle native_stream(Memory& lane) {
  const auto* const device = dynamic_cast<const DeviceMemory*>(&lane);
  return device != nullptr ? device->stream() : nullptr;
}

}  // namespace tandem::TANDEM_GPU

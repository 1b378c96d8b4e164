// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/compression_kernels.h"
#include "kernels/cuda/device_memory.h"

namespace tandem::TANDEM_GPU {

/// On the stream of a lane, which must outlive this.
class CudaCompression final : public CompressionKernels {
 public:
  explicit CudaCompression(DeviceMemory& memory) : memory_(memory) {}

  void quantize_blocks(int bits, std::int64_t block, const CodeCall& call, std::int32_t* refused) override;
  void dequantize_blocks(int bits, std::int64_t block, std::span<const std::byte> payload, Decode decode,
                         std::span<float> out) override;
  void pack_signs(std::int64_t block, const CodeCall& call, std::int32_t* refused) override;
  void unpack_signs(std::int64_t block, std::span<const std::byte> payload, Decode decode, std::span<float> out) override;
  void select_top_k(std::int64_t k, const CodeCall& call, std::int32_t* refused) override;
  void scatter_top_k(std::int64_t k, std::span<const std::byte> payload, Decode decode, std::span<float> out,
                     std::int32_t* refused) override;

 private:
  DeviceMemory& memory_;
};

}  // namespace tandem::TANDEM_GPU

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tandem {

/// One call of a lossy code, in memory of a device: the fields of CompressCall (optimized/compression/codec.h), with the same
/// rules.
struct CodeCall {
  std::span<const float> gradient;
  std::span<const float> residual;  ///< as long as gradient, or empty: zero
  std::span<float> new_residual;    ///< as long as gradient, or empty (then residual is empty too); may be the memory of residual
  std::span<std::byte> payload;     ///< any alignment
};
/// Throws ContractError where a residual is not as long as the gradient, or is added and not kept, or the payload has not this
/// size.
void check_sizes(const CodeCall& call, std::int64_t payload_bytes);

enum class Decode : std::uint8_t {
  overwrite,  ///< out = decoded
  accumulate  ///< out += decoded, one addition rounded per element
};

/// The codes of optimized/compression (BlockQuantizeCodec, SignCodec, TopKCodec) on a device: the same payloads, residuals and
/// decoded numbers, bit for bit. All memory is the device's; calls issue work in the order of the lane of the Kernels that this
/// belongs to and return.
///
/// `refused` is one number on the device, set to 1 where the code does not exist (an element of gradient + residual is infinite
/// or NaN, or its block would decode to infinity), else left as it is: payload and new_residual must not be used then. Sizes that
/// do not fit throw ContractError.
class CompressionKernels {
 public:
  virtual ~CompressionKernels() = default;

  /// `bits` 8 or 4. A scale belongs to one warp, beyond blocks of 2048 elements to 256 threads: meant for blocks of some
  /// hundreds.
  virtual void quantize_blocks(int bits, std::int64_t block, const CodeCall& call, std::int32_t* refused) = 0;
  virtual void dequantize_blocks(int bits, std::int64_t block, std::span<const std::byte> payload, Decode decode,
                                 std::span<float> out) = 0;

  /// The order of the sum behind a scale gives 16 threads to a block: meant for blocks of some hundreds.
  virtual void pack_signs(std::int64_t block, const CodeCall& call, std::int32_t* refused) = 0;
  virtual void unpack_signs(std::int64_t block, std::span<const std::byte> payload, Decode decode, std::span<float> out) = 0;

  /// The payload's min(k, elements) indices ascending, then their values; of equal magnitudes the smaller indices. At most 2^31 -
  /// 1 elements.
  virtual void select_top_k(std::int64_t k, const CodeCall& call, std::int32_t* refused) = 0;
  /// `refused` is set where the payload names an element that `out` does not have; it is left out.
  virtual void scatter_top_k(std::int64_t k, std::span<const std::byte> payload, Decode decode, std::span<float> out,
                             std::int32_t* refused) = 0;
};

}  // namespace tandem

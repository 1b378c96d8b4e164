// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/compression/codec.h"
#include "optimized/compression/instruction_set.h"

namespace tandem {

/// One bit per element, in blocks of `block` >= 1 consecutive elements, the last one shorter:
///
///   scale = mean |c| of the block;  decoded: -scale where the sign bit of c is set (-0 too), else scale
///
/// The mean is summed in double in 16 lanes, lane l adding elements l, l + 16, ... of the block, the lanes in order at the end.
/// new_residual + decoded is c within half a unit in the last place of new_residual. Payload: fp32 scale of every block; then a
/// bit per element, set where the sign bit is, the earliest element in the lowest bit; a block begins with a new byte, unused
/// bits are zero.
class SignCodec final : public Codec {
 public:
  explicit SignCodec(std::int64_t block, InstructionSet set = best_instruction_set());

  [[nodiscard]] std::string name() const override;
  [[nodiscard]] std::int64_t payload_bytes(std::int64_t elements) const override;
  [[nodiscard]] bool compress(const CompressCall& call) const override;
  void decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition& position) const override;
  void decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum,
                             const CodecPosition& position) const override;

 private:
  std::int64_t block_;
  InstructionSet set_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/compression/codec.h"
#include "optimized/compression/instruction_set.h"

namespace tandem {

/// Signed integers in blocks of `block` >= 1 consecutive elements, the last one shorter. L = 127 (INT8) or 7 (INT4):
///
///   scale = max |c| / L;  q = c / scale, rounded half to even, clamped to [-L, L]; 0 where the scale is 0;  decoded: q * scale
///
/// new_residual + decoded is c exactly (reference/compression.h says why). A block longer than the caches is read twice from
/// memory. Payload: fp32 scale of every block; then block after block, INT8: a byte per element; INT4: two elements in a byte,
/// the earlier one in the low four bits, two's complement. A block begins with a new byte: an odd INT4 block leaves its last four
/// bits zero, and a buffer cut between blocks has the payloads of its parts.
class BlockQuantizeCodec final : public Codec {
 public:
  /// Throws ContractError unless bits is 8 or 4 and block >= 1.
  BlockQuantizeCodec(int bits, std::int64_t block, InstructionSet set = best_instruction_set());

  [[nodiscard]] std::string name() const override;
  [[nodiscard]] std::int64_t payload_bytes(std::int64_t elements) const override;
  [[nodiscard]] bool compress(const CompressCall& call) const override;
  void decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition& position) const override;
  void decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum,
                             const CodecPosition& position) const override;

 private:
  int bits_;
  std::int64_t block_;
  InstructionSet set_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/compression/codec.h"
#include "optimized/compression/instruction_set.h"

namespace tandem {

/// The min(k, elements) elements of largest |c|; of equal ones those of smaller index. Decoded: c there, 0 elsewhere;
/// new_residual + decoded is c exactly. Payload: the indices, int32, ascending, then the values, fp32. Payloads of different
/// ranks name different elements, so they are gathered, not summed.
///
/// A sample of the magnitudes gives a threshold that a little more than k elements reach with near certainty; the pass that forms
/// c collects those, and an exact selection among them follows. Where the sample misled, the pass is repeated with a lower
/// threshold. Workspace: 4 bytes for each candidate, about 1.2 k of them, all elements at worst.
class TopKCodec final : public Codec {
 public:
  /// Throws ContractError unless k >= 0. Buckets of more than 2^31 - 1 elements are refused by payload_bytes() and the calls.
  explicit TopKCodec(std::int64_t k, InstructionSet set = best_instruction_set());

  [[nodiscard]] std::string name() const override;
  [[nodiscard]] std::int64_t payload_bytes(std::int64_t elements) const override;
  [[nodiscard]] bool compress(const CompressCall& call) const override;
  void decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition& position) const override;
  void decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum,
                             const CodecPosition& position) const override;

 private:
  std::int64_t k_;
  InstructionSet set_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "optimized/compression/codec.h"
#include "optimized/compression/instruction_set.h"

namespace tandem {

/// k different numbers of [0, count), ascending, the same on every rank: Floyd's algorithm with the draws of CounterRng(seed,
/// "random_k STEP BUCKET"), as reference/compression.h defines it. Throws ContractError unless 0 <= k <= count < 2^31.
[[nodiscard]] std::vector<std::int32_t> random_indices(std::uint64_t seed, const CodecPosition& position, std::int64_t k,
                                                       std::int64_t count);

/// The min(k, elements) elements at random_indices(). Decoded: c there, 0 elsewhere, not scaled up; new_residual + decoded is c
/// exactly. Payload: the values, fp32; every rank knows the indices, so payloads of equal position may be summed value by value.
class RandomKCodec final : public Codec {
 public:
  RandomKCodec(std::int64_t k, std::uint64_t seed, InstructionSet set = best_instruction_set());

  [[nodiscard]] std::string name() const override;
  [[nodiscard]] std::int64_t payload_bytes(std::int64_t elements) const override;
  [[nodiscard]] bool compress(const CompressCall& call) const override;
  void decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition& position) const override;
  void decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum,
                             const CodecPosition& position) const override;

 private:
  [[nodiscard]] std::vector<std::int32_t> indices(const CodecPosition& position, std::size_t elements) const;

  std::int64_t k_;
  std::uint64_t seed_;
  InstructionSet set_;
};

}  // namespace tandem

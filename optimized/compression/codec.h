// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tandem {

/// Which step and bucket a payload belongs to: the same on all ranks. Only random-K reads it.
struct CodecPosition {
  std::int64_t step = 0;
  std::int64_t bucket = 0;
};

/// One compression. Nothing overlaps but residual and new_residual, which may be the same memory.
struct CompressCall {
  std::span<const float> gradient;
  std::span<const float> residual;  ///< as long as gradient, or empty: zero
  std::span<float> new_residual;    ///< as long as gradient, or empty: no error feedback (then residual is empty too)
  std::span<std::byte> payload;     ///< payload_bytes(gradient.size()) bytes, any alignment
  CodecPosition position = {};
};

/// A lossy code of fp32 gradients, for one rank and one bucket at a time:
///
///   c = gradient + residual;  payload = code(c);  new_residual = c - decode(payload)
///
/// each operation rounded to fp32. In one pass over memory (Top-K and random-K touch few elements a second time). Calls are
/// deterministic and give the same bits on every machine. Payloads hold native (little-endian) numbers. Const and without state:
/// one object may serve several threads.
class Codec {
 public:
  virtual ~Codec() = default;

  /// "int8/256", "top_k/1000": the code and what decodes differently.
  [[nodiscard]] virtual std::string name() const = 0;

  /// Exactly what goes on the wire for `elements` elements.
  [[nodiscard]] virtual std::int64_t payload_bytes(std::int64_t elements) const = 0;

  /// False where an element of c is infinite or NaN, or so large that its block would decode to infinity. The contents of payload
  /// and new_residual are then undefined and must not be used: no rank may send, and the old residual, which must be other
  /// memory, stays the valid one (ErrorFeedback does that). Callers that need no such way back may give the same memory for both.
  /// Throws ContractError where sizes do not fit.
  [[nodiscard]] virtual bool compress(const CompressCall& call) const = 0;

  /// out = decode(payload), of every element. Throws ContractError where payload is not payload_bytes(out.size()) long, or names
  /// elements that `out` does not have.
  virtual void decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition& position) const = 0;
  /// sum += decode(payload), one addition rounded per element.
  virtual void decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum,
                                     const CodecPosition& position) const = 0;
};

namespace detail {

/// Throws ContractError unless the sizes of a call agree with each other and with its payload.
void check_sizes(const CompressCall& call, std::int64_t payload_bytes);
void check_payload(std::span<const std::byte> payload, std::int64_t expected_bytes);

inline constexpr std::uint32_t kMagnitudeMask = 0x7FFFFFFFU;
/// Bits of |x| from here on: infinity, NaN.
inline constexpr std::uint32_t kInfinityBits = 0x7F800000U;

}  // namespace detail
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/random_k.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "core/error.h"
#include "core/rng.h"
#include "optimized/compression/corrected_stream.h"
#include "optimized/compression/sparse.h"

namespace tandem {
namespace {

// new_residual = c where it is kept. False where an element is not finite.
template <bool kAdd, bool kKeep>
bool form(const CompressCall& call, InstructionSet set) {
  std::int32_t largest = 0;
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const auto elements = static_cast<std::int64_t>(call.gradient.size());
        const detail::CorrectedStream<kAdd, kKeep> stream(call);
        const float* const gradient = stream.gradient;
        const float* const residual = stream.residual;
        float* const new_residual = stream.new_residual;
        std::int32_t most = 0;
#pragma GCC ivdep
        for (std::int64_t i = 0; i < elements; ++i) {
          const float c = detail::corrected<kAdd>(gradient, residual, i);
          if constexpr (kKeep) new_residual[i] = c;
          most = std::max(most, detail::magnitude_bits(c));
        }
        largest = most;
      });
  return static_cast<std::uint32_t>(largest) < detail::kInfinityBits;
}

}  // namespace

std::vector<std::int32_t> random_indices(std::uint64_t seed, const CodecPosition& position, std::int64_t k, std::int64_t count) {
  TANDEM_CHECK(k >= 0 && k <= count, fmt::format("{} different numbers of {}", k, count));
  detail::check_indexable(count);
  CounterRng rng(seed, fmt::format("random_k {} {}", position.step, position.bucket));
  std::vector<std::uint64_t> chosen(static_cast<std::size_t>((count + 63) / 64));
  const auto word = [&chosen](std::uint64_t number) -> std::uint64_t& { return chosen[static_cast<std::size_t>(number / 64)]; };
  for (auto j = static_cast<std::uint64_t>(count - k); j < static_cast<std::uint64_t>(count); ++j) {
    const std::uint64_t t = rng.next_below(j + 1);
    const bool taken = (word(t) >> (t % 64) & 1U) != 0;
    const std::uint64_t number = taken ? j : t;
    word(number) |= std::uint64_t{1} << (number % 64);
  }
  std::vector<std::int32_t> indices;
  indices.reserve(static_cast<std::size_t>(k));
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    for (std::uint64_t bits = chosen[i]; bits != 0; bits &= bits - 1) {
      indices.push_back(static_cast<std::int32_t>(64 * i) + std::countr_zero(bits));
    }
  }
  return indices;
}

RandomKCodec::RandomKCodec(std::int64_t k, std::uint64_t seed, InstructionSet set) : k_(k), seed_(seed), set_(set) {
  detail::check_k(k);
}

std::string RandomKCodec::name() const { return fmt::format("random_k/{}/seed{}", k_, seed_); }

std::int64_t RandomKCodec::payload_bytes(std::int64_t elements) const {
  detail::check_indexable(elements);
  return std::min(k_, elements) * 4;
}

std::vector<std::int32_t> RandomKCodec::indices(const CodecPosition& position, std::size_t elements) const {
  const auto count = static_cast<std::int64_t>(elements);
  return random_indices(seed_, position, std::min(k_, count), count);
}

bool RandomKCodec::compress(const CompressCall& call) const {
  detail::check_sizes(call, payload_bytes(static_cast<std::int64_t>(call.gradient.size())));
  if (!detail::with_operands(call, [&]<bool kAdd, bool kKeep>() { return form<kAdd, kKeep>(call, set_); })) return false;
  detail::take(indices(call.position, call.gradient.size()), call, call.payload.data());
  return true;
}

void RandomKCodec::decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition& position) const {
  detail::check_payload(payload, payload_bytes(static_cast<std::int64_t>(out.size())));
  std::ranges::fill(out, 0.0F);
  detail::scatter(indices(position, out.size()), payload.data(), out);
}

void RandomKCodec::decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum,
                                         const CodecPosition& position) const {
  detail::check_payload(payload, payload_bytes(static_cast<std::int64_t>(sum.size())));
  detail::scatter_accumulate(indices(position, sum.size()), payload.data(), sum);
}

}  // namespace tandem

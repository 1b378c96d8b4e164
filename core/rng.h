// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tandem {

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a keyed bijection of
/// 128-bit counters. Random numbers are a function of (key, counter), never of how many were drawn before, so that
/// every parallel layout sees the same bits for the same global element.
using PhiloxBlock = std::array<std::uint32_t, 4>;

[[nodiscard]] constexpr PhiloxBlock philox4x32(PhiloxBlock counter, std::array<std::uint32_t, 2> key) noexcept {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

/// Where in a transformer a dropout mask is applied.
enum class DropoutSite : std::uint32_t { embedding = 0, attention_probability = 1, attention_residual = 2, mlp_residual = 3 };

/// Identity of one dropout mask of one training step. Element e of the mask, e being the *global* element index, is word
/// e % 4 of philox(counter = {e / 4 low, e / 4 high, step, layer * 8 + site}, key = seed), and the element is kept where
/// that word >= dropout_threshold(probability).
///
/// Global element index, `row` being the index of the sample in the global batch of the step:
///   embedding, attention_residual, mlp_residual   (row * sequence + position) * hidden + channel
///   attention_probability                         ((row * heads + head) * sequence + query) * sequence + key
/// where sequence, heads and hidden are the model's full sizes.
struct DropoutKey {
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
  std::uint32_t layer = 0;  ///< 0 for the embedding
  DropoutSite site = DropoutSite::embedding;

  [[nodiscard]] constexpr std::uint32_t word(std::uint64_t element_index) const noexcept {
    const std::uint64_t block = element_index / 4;
    const PhiloxBlock counter = {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), step,
                                 layer * 8 + static_cast<std::uint32_t>(site)};
    return philox4x32(counter, {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)})[element_index % 4];
  }
};

/// floor(probability * 2^32): an element is dropped where its word is below this. probability in [0, 1).
[[nodiscard]] std::uint32_t dropout_threshold(double probability);

/// Standard normal number of element `element_index` of the parameter `name` under `seed` (Box-Muller on one Philox
/// block per two elements, in double). Independent of layout, of order and of the other parameters.
[[nodiscard]] double parameter_normal(std::uint64_t seed, std::string_view name, std::uint64_t element_index);

/// A sequence of numbers for sampling and data order, its whole state being (key, position): seekable and copyable.
class CounterRng {
 public:
  /// `stream` separates uses that share a seed (sampler, corpus, generation, ...).
  CounterRng(std::uint64_t seed, std::string_view stream, std::uint64_t position = 0);

  [[nodiscard]] std::uint32_t next_u32() noexcept;
  [[nodiscard]] std::uint64_t next_u64() noexcept;
  /// Uniform in [0, bound), without bias. bound > 0.
  [[nodiscard]] std::uint64_t next_below(std::uint64_t bound) noexcept;
  /// Uniform in [0, 1), 53 bits.
  [[nodiscard]] double next_unit() noexcept;
  [[nodiscard]] double next_normal() noexcept;
  [[nodiscard]] std::uint64_t position() const noexcept { return position_; }

 private:
  std::array<std::uint32_t, 2> key_;
  std::uint64_t stream_;
  std::uint64_t position_;
};

/// FNV-1a, 64 bit: the hash behind names in keys above. Stable across platforms and versions; not for integrity.
[[nodiscard]] constexpr std::uint64_t fnv1a(std::string_view text) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

}  // namespace tandem

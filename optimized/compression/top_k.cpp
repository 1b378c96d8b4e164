// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/top_k.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/corrected_stream.h"
#include "optimized/compression/sparse.h"

namespace tandem {
namespace {

using detail::corrected;
using detail::CorrectedStream;
using detail::kInfinityBits;
using detail::magnitude_bits;

constexpr std::int64_t kSamples = 32768;
// Elements formed at a time: they are looked through while they are in the first-level cache.
constexpr std::int64_t kTile = 2048;
// Elements that are looked through one by one where any of them reaches the threshold.
constexpr std::int64_t kGroup = 32;

// Indices of the elements that may be among the k largest, ascending.
struct Candidates {
  std::vector<std::int32_t> indices;
  std::int64_t count = 0;
  std::int64_t equal = 0;  // of them with the magnitude of the threshold: more than k are never needed
};

// Magnitudes, largest first down to `rank`, of elements in equal distances.
class Sample {
 public:
  explicit Sample(const CompressCall& call) {
    const auto elements = static_cast<std::int64_t>(call.gradient.size());
    const std::int64_t samples = std::min(elements, kSamples);
    for (std::int64_t i = 0; i < samples; ++i) {
      const std::int64_t at = i * elements / samples;
      const float c = call.residual.empty() ? call.gradient[static_cast<std::size_t>(at)]
                                            : corrected<true>(call.gradient.data(), call.residual.data(), at);
      bits_.push_back(magnitude_bits(c));
    }
  }

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(bits_.size()); }

  // Of the rank-th largest, counted from 1; 0, which every element reaches, from the last on.
  [[nodiscard]] std::int32_t magnitude(std::int64_t rank) {
    if (rank >= size()) return 0;
    std::nth_element(bits_.begin(), bits_.begin() + rank - 1, bits_.end(), std::greater<>());
    return bits_[static_cast<std::size_t>(rank - 1)];
  }

 private:
  std::vector<std::int32_t> bits_;
};

// Appends the indices of the elements [first, first + count), which lie at `c`, whose magnitude is at least `threshold`.
[[gnu::always_inline]] inline void collect(const float* c, std::int64_t first, std::int64_t count, std::int32_t threshold,
                                           std::int64_t k, Candidates& candidates) {
  std::int32_t* const indices = candidates.indices.data();
  std::int64_t found = candidates.count;
  std::int64_t equal = candidates.equal;
  const auto look = [&](std::int64_t i) __attribute__((always_inline)) {
    const std::int32_t bits = magnitude_bits(c[i]);
    const bool is_equal = bits == threshold;
    indices[found] = static_cast<std::int32_t>(first + i);
    found += static_cast<std::int64_t>(bits > threshold || (is_equal && equal < k));
    equal += static_cast<std::int64_t>(is_equal);
  };
  std::int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    std::int32_t reached = 0;
    for (std::int64_t j = 0; j < kGroup; ++j) reached |= static_cast<std::int32_t>(magnitude_bits(c[i + j]) >= threshold);
    if (reached == 0) continue;
    for (std::int64_t j = 0; j < kGroup; ++j) look(i + j);
  }
  for (; i < count; ++i) look(i);
  candidates.count = found;
  candidates.equal = equal;
}

// new_residual = c, where it is kept, and the candidates. False where an element is not finite.
template <bool kAdd, bool kKeep>
bool form_and_collect(const CompressCall& call, std::int32_t threshold, std::int64_t k, Candidates& candidates,
                      InstructionSet set) {
  std::int32_t largest = 0;
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const auto elements = static_cast<std::int64_t>(call.gradient.size());
        CorrectedStream<kAdd, kKeep> stream(call);
        for (std::int64_t first = 0; first < elements; first += kTile) {
          const std::int64_t count = std::min(kTile, elements - first);
          const auto room = static_cast<std::size_t>(candidates.count + count);
          if (candidates.indices.size() < room) candidates.indices.resize(room + room / 2);
          const float* const gradient = stream.gradient;
          const float* const residual = stream.residual;
          float* const new_residual = stream.new_residual;
          std::int32_t largest_of_tile = 0;
#pragma GCC ivdep
          for (std::int64_t i = 0; i < count; ++i) {
            const float c = corrected<kAdd>(gradient, residual, i);
            if constexpr (kKeep) new_residual[i] = c;
            largest_of_tile = std::max(largest_of_tile, magnitude_bits(c));
          }
          largest = std::max(largest, largest_of_tile);
          if (largest_of_tile >= threshold) collect(kKeep ? new_residual : gradient, first, count, threshold, k, candidates);
          stream.advance(count);
        }
      });
  return static_cast<std::uint32_t>(largest) < kInfinityBits;
}

// Leaves the k best of at least k candidates, still ascending.
void select(const float* c, std::int64_t k, std::vector<std::int32_t>& candidates) {
  std::vector<std::int32_t> bits;
  bits.reserve(candidates.size());
  for (const std::int32_t index : candidates) bits.push_back(magnitude_bits(c[index]));
  std::nth_element(bits.begin(), bits.begin() + k - 1, bits.end(), std::greater<>());
  const std::int32_t least = bits[static_cast<std::size_t>(k - 1)];
  // All before position k are at least as large, those after it at most.
  std::int64_t equal_wanted = std::count(bits.begin(), bits.begin() + k, least);
  std::size_t kept = 0;
  for (const std::int32_t index : candidates) {
    const std::int32_t magnitude = magnitude_bits(c[index]);
    if (magnitude > least || (magnitude == least && equal_wanted-- > 0)) candidates[kept++] = index;
  }
  candidates.resize(kept);
}

// How many of `samples` are, with near certainty, fewer than k of `elements` have: the expectation and four standard deviations.
std::int64_t sample_rank(std::int64_t k, std::int64_t elements, std::int64_t samples) {
  if (samples == elements) return k;
  const double expected = static_cast<double>(k) * static_cast<double>(samples) / static_cast<double>(elements);
  return static_cast<std::int64_t>(expected + 4 * std::sqrt(expected)) + 8;
}

}  // namespace

TopKCodec::TopKCodec(std::int64_t k, InstructionSet set) : k_(k), set_(set) { detail::check_k(k); }

std::string TopKCodec::name() const { return fmt::format("top_k/{}", k_); }

std::int64_t TopKCodec::payload_bytes(std::int64_t elements) const {
  detail::check_indexable(elements);
  return std::min(k_, elements) * 8;
}

bool TopKCodec::compress(const CompressCall& call) const {
  const auto elements = static_cast<std::int64_t>(call.gradient.size());
  detail::check_sizes(call, payload_bytes(elements));
  const std::int64_t k = std::min(k_, elements);
  Sample sample(call);
  const std::int64_t rank = sample_rank(k, elements, sample.size());
  std::int32_t threshold = k == 0 ? static_cast<std::int32_t>(kInfinityBits) : sample.magnitude(rank);
  Candidates candidates;
  candidates.indices.resize(static_cast<std::size_t>(k + k / 4 + kTile));
  const bool finite = detail::with_operands(
      call, [&]<bool kAdd, bool kKeep>() { return form_and_collect<kAdd, kKeep>(call, threshold, k, candidates, set_); });
  if (!finite) return false;
  const CompressCall formed = {.gradient = call.new_residual.empty() ? call.gradient : std::span<const float>(call.new_residual),
                               .residual = {},
                               .new_residual = {},
                               .payload = call.payload};
  for (std::int64_t lower = 4 * rank; candidates.count < k; lower *= 4) {
    threshold = sample.magnitude(lower);
    candidates.count = candidates.equal = 0;
    static_cast<void>(form_and_collect<false, false>(formed, threshold, k, candidates, set_));
  }
  candidates.indices.resize(static_cast<std::size_t>(candidates.count));
  if (k > 0) select(formed.gradient.data(), k, candidates.indices);
  if (k == 0) candidates.indices.clear();
  const std::size_t index_bytes = candidates.indices.size() * sizeof(std::int32_t);
  if (index_bytes > 0) std::memcpy(call.payload.data(), candidates.indices.data(), index_bytes);
  detail::take(candidates.indices, call, call.payload.data() + index_bytes);
  return true;
}

namespace {

std::vector<std::int32_t> indices_of(std::span<const std::byte> payload) {
  std::vector<std::int32_t> indices(payload.size() / 8);
  if (!indices.empty()) std::memcpy(indices.data(), payload.data(), payload.size() / 2);
  return indices;
}

}  // namespace

void TopKCodec::decompress(std::span<const std::byte> payload, std::span<float> out, const CodecPosition&) const {
  detail::check_payload(payload, payload_bytes(static_cast<std::int64_t>(out.size())));
  std::ranges::fill(out, 0.0F);
  detail::scatter(indices_of(payload), payload.data() + payload.size() / 2, out);
}

void TopKCodec::decompress_accumulate(std::span<const std::byte> payload, std::span<float> sum, const CodecPosition&) const {
  detail::check_payload(payload, payload_bytes(static_cast<std::int64_t>(sum.size())));
  detail::scatter_accumulate(indices_of(payload), payload.data() + payload.size() / 2, sum);
}

}  // namespace tandem

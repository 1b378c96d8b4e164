// SPDX-License-Identifier: Apache-2.0
// Codes of gradients on the device: checks of sizes and launches.
#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/compression_kernels.h"
#include "kernels/cuda/cuda_compression.h"

namespace tandem::TANDEM_GPU {
namespace {

std::int64_t size_of(std::span<const float> values) { return static_cast<std::int64_t>(values.size()); }

CodeArrays checked(const CodeCall& call, std::int64_t payload_bytes, std::int32_t* refused) {
  check_sizes(call, payload_bytes);
  return {.gradient = call.gradient.data(),
          .residual = call.residual.empty() ? nullptr : call.residual.data(),
          .new_residual = call.new_residual.empty() ? nullptr : call.new_residual.data(),
          .payload = call.payload.data(),
          .elements = size_of(call.gradient),
          .refused = refused};
}

void check_payload(std::span<const std::byte> payload, std::int64_t expected_bytes) {
  TANDEM_CHECK(static_cast<std::int64_t>(payload.size()) == expected_bytes,
               fmt::format("a payload of {} bytes, expected {}", payload.size(), expected_bytes));
}

std::int64_t quantized_bytes(int bits, std::int64_t block, std::int64_t elements) {
  TANDEM_CHECK((bits == 8 || bits == 4) && block >= 1, fmt::format("{} bits in blocks of {}", bits, block));
  const auto bytes = [&](std::int64_t count) { return bits == 8 ? count : (count + 1) / 2; };
  return 4 * ((elements + block - 1) / block) + elements / block * bytes(block) + bytes(elements % block);
}

std::int64_t sign_bytes(std::int64_t block, std::int64_t elements) {
  TANDEM_CHECK(block >= 1, fmt::format("blocks of {}", block));
  return 4 * ((elements + block - 1) / block) + elements / block * ((block + 7) / 8) + (elements % block + 7) / 8;
}

std::int64_t checked_k(std::int64_t k, std::int64_t elements) {
  TANDEM_CHECK(k >= 0, fmt::format("k is {}", k));
  TANDEM_CHECK(elements <= std::numeric_limits<std::int32_t>::max(),
               fmt::format("{} elements are more than int32 indices reach: use smaller buckets", elements));
  return std::min(k, elements);
}

}  // namespace

void CudaCompression::quantize_blocks(int bits, std::int64_t block, const CodeCall& call, std::int32_t* refused) {
  const CodeArrays arrays = checked(call, quantized_bytes(bits, block, size_of(call.gradient)), refused);
  if (arrays.elements > 0) launch_quantize(bits, block, arrays, memory_.stream());
}

void CudaCompression::dequantize_blocks(int bits, std::int64_t block, std::span<const std::byte> payload, Decode decode,
                                        std::span<float> out) {
  check_payload(payload, quantized_bytes(bits, block, size_of(out)));
  if (!out.empty()) launch_dequantize(bits, block, payload.data(), decode, out.data(), size_of(out), memory_.stream());
}

void CudaCompression::pack_signs(std::int64_t block, const CodeCall& call, std::int32_t* refused) {
  const CodeArrays arrays = checked(call, sign_bytes(block, size_of(call.gradient)), refused);
  if (arrays.elements > 0) launch_pack_signs(block, arrays, memory_.stream());
}

void CudaCompression::unpack_signs(std::int64_t block, std::span<const std::byte> payload, Decode decode, std::span<float> out) {
  check_payload(payload, sign_bytes(block, size_of(out)));
  if (!out.empty()) launch_unpack_signs(block, payload.data(), decode, out.data(), size_of(out), memory_.stream());
}

void CudaCompression::select_top_k(std::int64_t k, const CodeCall& call, std::int32_t* refused) {
  const std::int64_t taken = checked_k(k, size_of(call.gradient));
  const CodeArrays arrays = checked(call, 8 * taken, refused);
  if (arrays.elements == 0) return;
  const Temporary state(memory_, sizeof(TopKState));
  const std::int64_t tiles = (arrays.elements + kTopKTile - 1) / kTopKTile;
  const Temporary counts(memory_, 2 * tiles * static_cast<std::int64_t>(sizeof(std::int32_t)));
  memory_.set_bytes(state.data(), 0, sizeof(TopKState));
  const auto rank = static_cast<std::int32_t>(taken);
  memory_.write(&rank, &state.as<TopKState>()->wanted, sizeof(rank));
  launch_form(arrays, state.as<TopKState>(), memory_.stream());
  if (taken == 0) return;
  const float* const c = arrays.new_residual != nullptr ? arrays.new_residual : arrays.gradient;
  launch_find_threshold(c, arrays.elements, state.as<TopKState>(), memory_.stream());
  launch_take(c, arrays.elements, taken, state.as<TopKState>(),
              {.above = counts.as<std::int32_t>(), .equal = counts.as<std::int32_t>() + tiles}, arrays.payload,
              arrays.new_residual, memory_.stream());
}

void CudaCompression::scatter_top_k(std::int64_t k, std::span<const std::byte> payload, Decode decode, std::span<float> out,
                                    std::int32_t* refused) {
  const std::int64_t taken = checked_k(k, size_of(out));
  check_payload(payload, 8 * taken);
  if (decode == Decode::overwrite && !out.empty()) memory_.set_bytes(out.data(), 0, static_cast<std::int64_t>(out.size_bytes()));
  if (taken > 0) launch_scatter(taken, payload.data(), decode, out.data(), size_of(out), refused, memory_.stream());
}

}  // namespace tandem::TANDEM_GPU

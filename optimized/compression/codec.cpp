// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/codec.h"

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::detail {

void check_sizes(const CompressCall& call, std::int64_t payload_bytes) {
  const std::size_t elements = call.gradient.size();
  TANDEM_CHECK(call.residual.empty() || call.residual.size() == elements,
               fmt::format("{} gradients, {} residuals", elements, call.residual.size()));
  TANDEM_CHECK(call.new_residual.empty() || call.new_residual.size() == elements,
               fmt::format("{} gradients, {} new residuals", elements, call.new_residual.size()));
  TANDEM_CHECK(call.residual.empty() || !call.new_residual.empty(), "a residual that is added would be lost");
  TANDEM_CHECK(static_cast<std::int64_t>(call.payload.size()) == payload_bytes,
               fmt::format("a payload of {} elements has {} bytes, not {}", elements, payload_bytes, call.payload.size()));
}

void check_payload(std::span<const std::byte> payload, std::int64_t expected_bytes) {
  TANDEM_CHECK(static_cast<std::int64_t>(payload.size()) == expected_bytes,
               fmt::format("a payload of {} bytes, expected {}", payload.size(), expected_bytes));
}

}  // namespace tandem::detail

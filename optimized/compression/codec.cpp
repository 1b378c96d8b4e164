// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/codec.h"

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/compression_kernels.h"

namespace tandem::detail {

void check_sizes(const CompressCall& call, std::int64_t payload_bytes) {
  tandem::check_sizes(CodeCall{call.gradient, call.residual, call.new_residual, call.payload}, payload_bytes);
}

void check_payload(std::span<const std::byte> payload, std::int64_t expected_bytes) {
  TANDEM_CHECK(static_cast<std::int64_t>(payload.size()) == expected_bytes,
               fmt::format("a payload of {} bytes, expected {}", payload.size(), expected_bytes));
}

}  // namespace tandem::detail

// SPDX-License-Identifier: Apache-2.0
#include "kernels/compression_kernels.h"

#include <cstddef>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

void check_sizes(const CodeCall& call, std::int64_t payload_bytes) {
  const std::size_t elements = call.gradient.size();
  TANDEM_CHECK(call.residual.empty() || call.residual.size() == elements,
               fmt::format("{} gradients, {} residuals", elements, call.residual.size()));
  TANDEM_CHECK(call.new_residual.empty() || call.new_residual.size() == elements,
               fmt::format("{} gradients, {} new residuals", elements, call.new_residual.size()));
  TANDEM_CHECK(call.residual.empty() || !call.new_residual.empty(), "a residual that is added would be lost");
  TANDEM_CHECK(static_cast<std::int64_t>(call.payload.size()) == payload_bytes,
               fmt::format("a payload of {} elements has {} bytes, not {}", elements, payload_bytes, call.payload.size()));
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace tandem {

/// destinations[d][i] = ((sources[0][i] + sources[1][i]) + sources[2][i]) + ...   for i < count and every d
///
/// in `dtype`; 16-bit floats are added in fp32 and rounded once, integers wrap around. Any alignment. A destination may be one of
/// the sources (all elements are read before the same elements are written); other overlaps are not allowed. sources are not
/// empty.
void sum_in_order(DType dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                  std::int64_t count) noexcept;

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/dtype.h"

namespace tandem {

/// destinations[d][i] = ((sources[0][i] + sources[1][i]) + sources[2][i]) + ...   for i < count and every d
///
/// in `dtype`; 16-bit floats are added in fp32 and rounded once, integers wrap around. Any alignment. A destination may be one of
/// the sources (all elements are read before the same elements are written); other overlaps are not allowed. sources are not
/// empty.
void sum_in_order(DType dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                  std::int64_t count) noexcept;

/// The builds of sum_in_order for different instruction sets that this machine can run, best first; all give the same bits.
struct SumVariant {
  std::string_view instruction_set;  ///< "avx512", "avx2", "baseline"
  void (*sum)(DType, std::span<const std::byte* const>, std::span<std::byte* const>, std::int64_t);
};
[[nodiscard]] std::span<const SumVariant> sum_variants() noexcept;

}  // namespace tandem

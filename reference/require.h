// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::reference {

/// Throws ContractError unless `values` has `expected` elements.
template <class T>
void require_size(std::span<T> values, std::int64_t expected, std::string_view what) {
  TANDEM_CHECK(static_cast<std::int64_t>(values.size()) == expected,
               fmt::format("{} has {} elements, expected {}", what, values.size(), expected));
}

/// Row `index` of a row-major matrix of `width` columns.
template <class T>
[[nodiscard]] std::span<T> row_of(std::span<T> values, std::int64_t index, std::int64_t width) {
  return values.subspan(static_cast<std::size_t>(index * width), static_cast<std::size_t>(width));
}

}  // namespace tandem::reference

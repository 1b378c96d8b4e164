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

/// Sum of a[i] b[i], products and sum in double.
template <class Real>
[[nodiscard]] double dot(std::span<const Real> a, std::span<const Real> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

/// sums += factor x, in double.
template <class Real>
void add_scaled(double factor, std::span<const Real> x, std::span<double> sums) {
  for (std::size_t i = 0; i < x.size(); ++i) sums[i] += factor * static_cast<double>(x[i]);
}

/// Rounds `sums` to what `out` stores.
template <class Real>
void store(std::span<const double> sums, std::span<Real> out) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<Real>(sums[i]);
}

}  // namespace tandem::reference

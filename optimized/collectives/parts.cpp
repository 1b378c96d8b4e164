// SPDX-License-Identifier: Apache-2.0
#include "optimized/collectives/parts.h"

#include <array>
#include <cstring>

#include "core/batch.h"
#include "kernels/cpu/sum_in_order.h"

namespace tandem::collectives {

Parts::Parts(DType dtype) : dtype_(dtype), width_(static_cast<std::int64_t>(size_bytes(dtype))) {}

Parts::Parts(std::span<const std::int64_t> counts, DType dtype) : Parts(dtype) {
  begins_.reserve(counts.size() + 1);
  for (const std::int64_t count : counts) append(count);
}

Parts Parts::even(std::int64_t elements, int parts, DType dtype) {
  Parts result(dtype);
  result.begins_.reserve(static_cast<std::size_t>(parts) + 1);
  for (int part = 0; part < parts; ++part) result.append(balanced_part(elements, parts, part).size());
  return result;
}

Parts Parts::grouped(std::span<const int> group_sizes) const {
  Parts result(dtype_);
  int first = 0;
  for (const int size : group_sizes) {
    result.append(elements(first, first + size));
    first += size;
  }
  return result;
}

void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to) noexcept {
  if (!from.empty() && from.data() != to.data()) std::memcpy(to.data(), from.data(), from.size());
}

void add(DType dtype, std::span<const std::byte> first, std::span<const std::byte> second, std::span<std::byte> output) noexcept {
  const std::array<const std::byte*, 2> sources = {first.data(), second.data()};
  const std::array<std::byte*, 1> destinations = {output.data()};
  sum_in_order(dtype, sources, destinations, static_cast<std::int64_t>(output.size() / size_bytes(dtype)));
}

}  // namespace tandem::collectives

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/dtype.h"

namespace tandem::collectives {

/// Where each part of a buffer lies: part p is counts[p] elements, parts follow one another.
class Parts {
 public:
  Parts(std::span<const std::int64_t> counts, DType dtype);
  /// `elements` split into `parts` of which the first ones are one element longer.
  static Parts even(std::int64_t elements, int parts, DType dtype);
  /// Parts first, first + 1, ... of each group of so many, together: group g is one part of the result.
  [[nodiscard]] Parts grouped(std::span<const int> group_sizes) const;

  [[nodiscard]] int size() const noexcept { return static_cast<int>(begins_.size()) - 1; }
  [[nodiscard]] std::int64_t elements(int part) const noexcept { return elements(part, part + 1); }
  /// Of parts [first, last).
  [[nodiscard]] std::int64_t elements(int first, int last) const noexcept {
    return begins_[static_cast<std::size_t>(last)] - begins_[static_cast<std::size_t>(first)];
  }
  [[nodiscard]] std::int64_t bytes(int first, int last) const noexcept { return elements(first, last) * width_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes(0, size()); }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }

  /// Part `part`, or parts [first, last), of a buffer that holds all of them.
  template <class Byte>
  [[nodiscard]] std::span<Byte> of(std::span<Byte> buffer, int first, int last) const {
    return buffer.subspan(static_cast<std::size_t>(begins_[static_cast<std::size_t>(first)] * width_),
                          static_cast<std::size_t>(bytes(first, last)));
  }
  template <class Byte>
  [[nodiscard]] std::span<Byte> of(std::span<Byte> buffer, int part) const {
    return of(buffer, part, part + 1);
  }

 private:
  explicit Parts(DType dtype);
  void append(std::int64_t elements) { begins_.push_back(begins_.back() + elements); }

  DType dtype_;
  std::int64_t width_;
  std::vector<std::int64_t> begins_ = {0};  // element at which each part begins, and the end
};

/// to <- from where they are different places; sizes are equal, the two do not overlap otherwise.
void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to) noexcept;

/// output <- first + second, in that order (kernels/cpu/sum_in_order.h); output may be either.
void add(DType dtype, std::span<const std::byte> first, std::span<const std::byte> second, std::span<std::byte> output) noexcept;

}  // namespace tandem::collectives

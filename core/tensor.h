// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"

namespace tandem {

/// Extents, outermost first; row-major.
using Shape = std::vector<std::int64_t>;

[[nodiscard]] std::int64_t num_elements(const Shape& shape);

/// "[4, 16, 64]"
[[nodiscard]] std::string to_string(const Shape& shape);

/// A borrowed, contiguous, row-major block of elements of one dtype. Owns nothing; copying it copies the pointer.
/// At most four dimensions, so that it is a value without allocation. A default-constructed view is empty (`!view`).
class TensorView {
 public:
  TensorView() = default;
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape);
  TensorView(void* data, DType dtype, const Shape& shape);

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] int num_dims() const noexcept { return num_dims_; }
  [[nodiscard]] std::int64_t dim(int index) const {
    TANDEM_CHECK(index >= 0 && index < num_dims_);
    return dims_[index];
  }
  [[nodiscard]] Shape shape() const { return Shape(dims_, dims_ + num_dims_); }
  [[nodiscard]] std::int64_t num_elements() const noexcept {
    std::int64_t count = 1;
    for (int i = 0; i < num_dims_; ++i) count *= dims_[i];
    return data_ == nullptr ? 0 : count;
  }
  [[nodiscard]] std::int64_t size_bytes() const;

  /// View of `count` elements from element `first` on, one-dimensional.
  [[nodiscard]] TensorView flat(std::int64_t first, std::int64_t count) const;
  [[nodiscard]] TensorView flat() const { return flat(0, num_elements()); }
  /// The same elements under another shape; throws ContractError if the counts differ.
  [[nodiscard]] TensorView reshaped(std::initializer_list<std::int64_t> shape) const;
  /// Rows [first, first + count) of the outermost dimension.
  [[nodiscard]] TensorView rows(std::int64_t first, std::int64_t count) const;

  /// The elements as T; throws ContractError if T is not the dtype.
  template <class T>
  [[nodiscard]] std::span<T> as() const {
    TANDEM_CHECK(dtype_of<std::remove_const_t<T>> == dtype_);
    return {static_cast<T*>(data_), static_cast<std::size_t>(num_elements())};
  }

  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::f32;
  int num_dims_ = 0;
  std::int64_t dims_[4] = {0, 0, 0, 0};
};

/// `values` as a view of its dtype; the vector must outlive the view.
template <class T>
[[nodiscard]] TensorView view_of(std::vector<T>& values, const Shape& shape) {
  TANDEM_CHECK(num_elements(shape) == static_cast<std::int64_t>(values.size()));
  return TensorView(values.data(), dtype_of<T>, shape);
}

}  // namespace tandem

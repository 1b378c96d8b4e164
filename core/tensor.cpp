// SPDX-License-Identifier: Apache-2.0
#include "core/tensor.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tandem {

std::int64_t num_elements(const Shape& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

TensorView::TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape)
    : TensorView(data, dtype, Shape(shape)) {}

TensorView::TensorView(void* data, DType dtype, const Shape& shape)
    : data_(data), dtype_(dtype), num_dims_(static_cast<int>(shape.size())) {
  TANDEM_CHECK(shape.size() <= 4, fmt::format("a view has at most 4 dimensions, not {}", shape.size()));
  std::copy(shape.begin(), shape.end(), dims_);
}

std::int64_t TensorView::size_bytes() const { return num_elements() * static_cast<std::int64_t>(tandem::size_bytes(dtype_)); }

TensorView TensorView::flat(std::int64_t first, std::int64_t count) const {
  TANDEM_CHECK(first >= 0 && count >= 0 && first + count <= num_elements(),
               fmt::format("elements [{}, {}) of {}", first, first + count, num_elements()));
  auto* bytes = static_cast<std::byte*>(data_) + first * static_cast<std::int64_t>(tandem::size_bytes(dtype_));
  return {bytes, dtype_, {count}};
}

TensorView TensorView::reshaped(std::initializer_list<std::int64_t> shape) const {
  TensorView result(data_, dtype_, shape);
  TANDEM_CHECK(result.num_elements() == num_elements(),
               fmt::format("{} cannot become {}", to_string(this->shape()), to_string(result.shape())));
  return result;
}

TensorView TensorView::rows(std::int64_t first, std::int64_t count) const {
  TANDEM_CHECK(num_dims_ >= 1 && first >= 0 && count >= 0 && first + count <= dims_[0],
               fmt::format("rows [{}, {}) of {}", first, first + count, to_string(shape())));
  const std::int64_t row_elements = dims_[0] == 0 ? 0 : num_elements() / dims_[0];
  TensorView result = *this;
  result.dims_[0] = count;
  result.data_ = static_cast<std::byte*>(data_) + first * row_elements * static_cast<std::int64_t>(tandem::size_bytes(dtype_));
  return result;
}

}  // namespace tandem

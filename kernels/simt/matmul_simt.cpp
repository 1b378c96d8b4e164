// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/matmul.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/simt/heap.h"
#include "kernels/simt/queue.h"

namespace tandem::simt_gpu {
namespace {

/// op(X) [rows, columns] of what is stored at `from`, widened.
template <class T>
std::vector<Wide<T>> widened(const void* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                             Transposed transposed) {
  const T* const elements = static_cast<const T*>(from);
  std::vector<Wide<T>> values(static_cast<std::size_t>(rows * columns));
  const std::int64_t down = transposed == Transposed::yes ? 1 : stride, across = transposed == Transposed::yes ? stride : 1;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      values[static_cast<std::size_t>(row * columns + column)] = to_wide(elements[row * down + column * across]);
    }
  }
  return values;
}

template <class Real>
Real gelu(Real x) {
  constexpr Real kRootTwoOverPi = Real(0.79788456080286535588), kCubic = Real(0.044715);
  return Real(0.5) * x * (Real(1) + std::tanh(kRootTwoOverPi * (x + kCubic * x * x * x)));
}

/// A row of C from its sums. The gelu is that of the number as it is stored.
template <class T>
void store_row(const Product& product, std::int64_t row, std::vector<Wide<T>>& sums) {
  T* const c = static_cast<T*>(product.c) + row * product.c_stride;
  T* const before_gelu = static_cast<T*>(product.before_gelu);
  const T* const bias = static_cast<const T*>(product.bias);
  for (std::int64_t column = 0; column < product.columns; ++column) {
    Wide<T> sum = sums[static_cast<std::size_t>(column)];
    if (bias != nullptr) sum += to_wide(bias[column]);
    if (product.beta != 0) sum += to_wide(c[column]);
    c[column] = from_wide<T>(sum);
    if (before_gelu == nullptr) continue;
    before_gelu[row * product.c_stride + column] = c[column];
    c[column] = from_wide<T>(gelu(to_wide(c[column])));
  }
}

/// Sums over the inner index in ascending order, whatever the size.
template <class Operand, class Result>
void multiply_as(const Product& product) {
  using Real = Wide<Operand>;
  const std::vector<Real> a = widened<Operand>(product.a, product.rows, product.inner, product.a_stride, product.transpose_a);
  const std::vector<Real> b = widened<Operand>(product.b, product.inner, product.columns, product.b_stride, product.transpose_b);
  std::vector<Real> sums(static_cast<std::size_t>(product.columns));
  for (std::int64_t row = 0; row < product.rows; ++row) {
    sums.assign(sums.size(), Real(0));
    for (std::int64_t inner = 0; inner < product.inner; ++inner) {
      const Real factor = a[static_cast<std::size_t>(row * product.inner + inner)];
      const Real* const from = &b[static_cast<std::size_t>(inner * product.columns)];
      for (std::size_t column = 0; column < sums.size(); ++column) sums[column] += factor * from[column];
    }
    store_row<Result>(product, row, sums);
  }
}

/// Bytes from the first to behind the last element of a stored matrix.
std::int64_t extent(std::int64_t rows, std::int64_t columns, std::int64_t stride, DType dtype) {
  return ((rows - 1) * stride + columns) * static_cast<std::int64_t>(size_bytes(dtype));
}

void check_in_memory(const char* operand, const void* address, std::int64_t extent_bytes) {
  if (address == nullptr || heap().holds_all(address, extent_bytes)) return;
  throw GpuError(fmt::format("emulated GPU: multiply: {} ({} bytes at {}) is not in one block of the device's memory", operand,
                             extent_bytes, address));
}

void check_operands(const Product& product) {
  const bool turn_a = product.transpose_a == Transposed::yes, turn_b = product.transpose_b == Transposed::yes;
  check_in_memory(
      "a", product.a,
      extent(turn_a ? product.inner : product.rows, turn_a ? product.rows : product.inner, product.a_stride, product.operands));
  check_in_memory("b", product.b,
                  extent(turn_b ? product.columns : product.inner, turn_b ? product.inner : product.columns, product.b_stride,
                         product.operands));
  check_in_memory("c", product.c, extent(product.rows, product.columns, product.c_stride, product.result));
  check_in_memory("bias", product.bias, extent(1, product.columns, product.columns, product.result));
  check_in_memory("before_gelu", product.before_gelu, extent(product.rows, product.columns, product.c_stride, product.result));
}

class PlainProducts final : public MatrixProducts {
 public:
  /// Not what cuBLASLt does not do either, so that the ways round it are tried here.
  [[nodiscard]] bool fuses(const Product& product) override {
    const auto is_aligned = [](const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; };
    // A gelu is fused for bf16 alone: where numbers are finer, that of the kernels has other bits, and one that is recomputed is
    // theirs.
    if (product.before_gelu != nullptr &&
        (product.result != DType::bf16 || product.c_stride % 8 != 0 || !is_aligned(product.before_gelu))) {
      return false;
    }
    return is_aligned(product.bias);
  }
  void multiply(const Product& product, StreamHandle stream) override {
    TANDEM_CHECK(product.beta == 0 || product.beta == 1, fmt::format("beta {}", product.beta));
    TANDEM_CHECK(product.beta == 0 || (product.bias == nullptr && product.before_gelu == nullptr), "an epilogue beside beta");
    TANDEM_CHECK(product.result == product.operands || (is_16bit(product.operands) && product.result == DType::f32),
                 fmt::format("a product of {} in {}", tandem::name(product.operands), tandem::name(product.result)));
    if (product.rows == 0 || product.columns == 0) return;
    if (product.inner > 0) check_operands(product);
    stream->add([product] {
      with_storage(product.operands, [&product](auto tag) {
        using T = decltype(tag);
        if (product.result == product.operands) return multiply_as<T, T>(product);
        if constexpr (sizeof(T) == 2) multiply_as<T, float>(product);
      });
    });
  }
  [[nodiscard]] std::string name() const override { return "plain loops"; }
};

}  // namespace

std::unique_ptr<MatrixProducts> make_matrix_products(const DeviceInfo& /*device*/) { return std::make_unique<PlainProducts>(); }

}  // namespace tandem::simt_gpu

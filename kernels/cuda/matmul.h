// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/dtype.h"
#include "kernels/cuda/gpu.h"

namespace tandem::TANDEM_GPU {

enum class Transposed : std::uint8_t { no, yes };

/// C [rows, columns] = beta C + op(A) op(B), row-major, with op(A) [rows, inner] and op(B) [inner, columns]; leading dimensions
/// are elements between rows of A, B and C as they are stored. Sums are formed in fp32 (fp64 for fp64) and rounded once.
struct Product {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  std::int64_t rows = 0, columns = 0, inner = 0;
  std::int64_t a_stride = 0, b_stride = 0, c_stride = 0;
  Transposed transpose_a = Transposed::no, transpose_b = Transposed::no;
  DType operands = DType::f32;  ///< of A and B
  DType result = DType::f32;    ///< of C: `operands`, or fp32 beside 16-bit operands
  double beta = 0;              ///< 0 (C is not read) or 1
  // Epilogues, applied to the sums before they are rounded; only with beta 0.
  const void* bias = nullptr;   ///< [columns], of dtype `result`: C + bias
  void* before_gelu = nullptr;  ///< with `bias`. [rows, columns], as C: gets C + bias, and C becomes gelu (tanh) of that
};

/// Matrix products of one stream. The CUDA implementation is cuBLASLt, found when the program runs; algorithms are chosen by its
/// heuristic once per shape and kept, and are the same in every run (no split-K with atomics). The emulator's adds in order.
class MatrixProducts {
 public:
  virtual ~MatrixProducts() = default;
  /// Whether multiply() has this product's epilogues; without them it has every product. A fused gelu may be that of the sum
  /// before it is rounded.
  [[nodiscard]] virtual bool fuses(const Product& product) {
    static_cast<void>(product);
    return true;
  }
  virtual void multiply(const Product& product, StreamHandle stream) = 0;
  [[nodiscard]] virtual std::string name() const = 0;  ///< "cuBLASLt 13.1.0"
};
/// Throws InputError where the library is not there.
[[nodiscard]] std::unique_ptr<MatrixProducts> make_matrix_products(const DeviceInfo& device);

}  // namespace tandem::TANDEM_GPU

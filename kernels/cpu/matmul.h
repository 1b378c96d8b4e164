// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/common_kernels.h"
#include "kernels/cpu/simd/vector_ops.h"

namespace tandem::cpu {

/// A library that multiplies matrices on the calling thread alone. Any number of threads may call at once.
class MatrixLibrary {
 public:
  virtual ~MatrixLibrary() = default;
  /// "oneDNN 2.6.3"
  [[nodiscard]] virtual std::string name() const = 0;
  [[nodiscard]] virtual bool has_double() const = 0;
  virtual void multiply(const MatrixProduct& product, const float* a, const float* b, float* c) const = 0;
  /// Throws ContractError where !has_double().
  virtual void multiply(const MatrixProduct& product, const double* a, const double* b, double* c) const = 0;
  /// Whether bf16 operands are multiplied by instructions for them: faster than fp32.
  [[nodiscard]] virtual bool has_bf16() const { return false; }
  /// Operands in bf16 (bits), sums and result in fp32. Throws ContractError where !has_bf16().
  virtual void multiply(const MatrixProduct& product, const std::uint16_t* a, const std::uint16_t* b, float* c) const;
};

/// Null where the build has no such library. `tables` must outlive the result.
[[nodiscard]] std::unique_ptr<MatrixLibrary> make_onednn_library();
[[nodiscard]] std::unique_ptr<MatrixLibrary> make_openblas_library();
[[nodiscard]] std::unique_ptr<MatrixLibrary> make_own_library(const VectorTables& tables);

/// Division of C into equal blocks, a function of the shape alone: whoever computes which, the sums are the same. Libraries
/// choose the order of a sum by the shape that they are given, so dividing by the number of threads would change bits.
struct BlockGrid {
  std::int64_t rows_per_block = 0, columns_per_block = 0;
  std::int64_t down = 0, across = 0;  ///< numbers of blocks
};
[[nodiscard]] BlockGrid block_grid(std::int64_t m, std::int64_t n, std::int64_t k);

/// Block `index` of a grid.
struct Block {
  std::int64_t row, column, rows, columns;
};
[[nodiscard]] Block block_at(const BlockGrid& grid, std::int64_t m, std::int64_t n, std::int64_t index);

/// Computes one block of a product on the calling thread. c is where the block's first element goes.
template <class Operand, class Result>
void multiply_block(const MatrixLibrary& library, MatrixProduct product, const Block& block, const Operand* a, const Operand* b,
                    Result* c) {
  a += block.row * (product.transpose_a ? 1 : product.lda);
  b += block.column * (product.transpose_b ? product.ldb : 1);
  product.m = block.rows;
  product.n = block.columns;
  library.multiply(product, a, b, c);
}

}  // namespace tandem::cpu

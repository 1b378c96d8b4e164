// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/simd/vector_ops.h"
#include "kernels/cpu/storage.h"

namespace tandem::cpu {

/// KernelsInfo::bf16_products where bf16 operands are converted.
inline constexpr const char* kConvertedProducts = "converted to fp32";

/// A product whose operands are not multiplied as they lie in memory in fp32 or fp64, or whose result is 16 bits wide.
///
/// A block of fp32 results is made in place; one of 16-bit results in the thread's scratch, and rounded once. Operands that the
/// library takes as they are (bf16, where it has instructions for them) are read in place. Others are converted into scratch,
/// kDepth of the summed dimension at a time: tiles, never a copy of a tensor.
class NarrowProduct {
 public:
  /// `rounded`: what fp32 operands are rounded to (autocast), or the dtype of 16-bit ones. `as_bf16`: it is bf16, and the library
  /// multiplies that; else it multiplies fp32. All references must outlive this.
  NarrowProduct(const VectorTables& tables, const MatrixLibrary& library, const ProductCall& call, DType rounded, bool as_bf16);

  [[nodiscard]] const BlockGrid& grid() const noexcept { return grid_; }
  [[nodiscard]] std::size_t scratch_bytes() const;
  /// Computes block `index` of the grid; `scratch` is 64-byte aligned.
  void compute(std::int64_t index, std::byte* scratch) const;

 private:
  struct Scratch;

  [[nodiscard]] Scratch cut(std::byte* memory) const;
  void product(const Block& block, const Scratch& scratch, float* c, std::int64_t ldc) const;
  template <class Element>
  void converted_product(const Block& block, const Scratch& scratch, MatrixProduct part, float* c) const;
  void convert(const TensorView& operand, std::int64_t leading, std::int64_t row, std::int64_t column, std::int64_t rows,
               std::int64_t columns, const Scratch& scratch, void* to) const;
  void finish(const Block& block, const Scratch& scratch, float* c, std::int64_t ldc) const;
  void finish_row(std::int64_t first, std::int64_t count, const Scratch& scratch, float* row) const;

  const VectorTables& tables_;
  const MatrixLibrary& library_;
  const ProductCall& call_;
  DType rounded_;       // of operands
  bool bf16_elements_;  // what the library multiplies: bf16 or fp32
  bool in_place_;       // operands
  bool direct_;         // results
  BlockGrid grid_;
};

}  // namespace tandem::cpu

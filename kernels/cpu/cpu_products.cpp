// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_products.h"

#include <algorithm>

#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {
namespace {

constexpr std::int64_t kDepth = 1024;  // of the summed dimension, converted at a time

constexpr std::size_t aligned(std::size_t size_bytes) { return (size_bytes + 63) / 64 * 64; }

}  // namespace

/// Of one thread. A null memory is only measured.
struct NarrowProduct::Scratch {
  float *block, *bias;
  std::byte *a, *b;
  std::uint16_t* rounded;  // one converted row
  std::size_t size_bytes;
};

NarrowProduct::NarrowProduct(const VectorTables& tables, const MatrixLibrary& library, const ProductCall& call, DType rounded,
                             bool as_bf16)
    : tables_(tables),
      library_(library),
      call_(call),
      rounded_(rounded),
      bf16_elements_(as_bf16),
      in_place_(as_bf16 && call.a.dtype() == DType::bf16),
      direct_(call.c.dtype() == DType::f32),
      grid_(block_grid(call.shape.m, call.shape.n, call.shape.k)) {}

NarrowProduct::Scratch NarrowProduct::cut(std::byte* memory) const {
  std::size_t used = 0;
  const auto take = [&](std::int64_t count, std::size_t element_bytes) {
    std::byte* taken = memory == nullptr ? nullptr : memory + used;
    used += aligned(static_cast<std::size_t>(count) * element_bytes);
    return taken;
  };
  const std::int64_t rows = grid_.rows_per_block, columns = grid_.columns_per_block;
  const std::int64_t depth = in_place_ ? 0 : std::min(kDepth, call_.shape.k);
  const std::size_t element_bytes = bf16_elements_ ? sizeof(std::uint16_t) : sizeof(float);
  Scratch scratch{};
  scratch.block = reinterpret_cast<float*>(take(direct_ ? 0 : rows * columns, sizeof(float)));
  scratch.bias = reinterpret_cast<float*>(take(columns, sizeof(float)));
  scratch.a = take(rows * depth, element_bytes);
  scratch.b = take(columns * depth, element_bytes);
  scratch.rounded = reinterpret_cast<std::uint16_t*>(take(std::max({rows, columns, depth}), sizeof(std::uint16_t)));
  scratch.size_bytes = used;
  return scratch;
}

std::size_t NarrowProduct::scratch_bytes() const { return cut(nullptr).size_bytes; }

void NarrowProduct::compute(std::int64_t index, std::byte* memory) const {
  const Block block = block_at(grid_, call_.shape.m, call_.shape.n, index);
  const Scratch scratch = cut(memory);
  const std::int64_t ldc = direct_ ? call_.shape.ldc : block.columns;
  float* c = direct_ ? data_of<float>(call_.c) + block.row * ldc + block.column : scratch.block;
  product(block, scratch, c, ldc);
  finish(block, scratch, c, ldc);
}

void NarrowProduct::product(const Block& block, const Scratch& scratch, float* c, std::int64_t ldc) const {
  MatrixProduct part = call_.shape;
  part.ldc = ldc;
  part.accumulate = direct_ && call_.shape.accumulate;
  if (in_place_) {
    multiply_block(library_, part, block, data_of<const std::uint16_t>(call_.a), data_of<const std::uint16_t>(call_.b), c);
  } else if (bf16_elements_) {
    converted_product<std::uint16_t>(block, scratch, part, c);
  } else {
    converted_product<float>(block, scratch, part, c);
  }
}

template <class Element>
void NarrowProduct::converted_product(const Block& block, const Scratch& scratch, MatrixProduct part, float* c) const {
  const MatrixProduct& whole = call_.shape;
  part.m = block.rows;
  part.n = block.columns;
  for (std::int64_t first = 0; first < whole.k; first += kDepth) {
    part.k = std::min(kDepth, whole.k - first);
    if (whole.transpose_a) {
      part.lda = block.rows;
      convert(call_.a, whole.lda, first, block.row, part.k, block.rows, scratch, scratch.a);
    } else {
      part.lda = part.k;
      convert(call_.a, whole.lda, block.row, first, block.rows, part.k, scratch, scratch.a);
    }
    if (whole.transpose_b) {
      part.ldb = part.k;
      convert(call_.b, whole.ldb, block.column, first, block.columns, part.k, scratch, scratch.b);
    } else {
      part.ldb = block.columns;
      convert(call_.b, whole.ldb, first, block.column, part.k, block.columns, scratch, scratch.b);
    }
    library_.multiply(part, reinterpret_cast<const Element*>(scratch.a), reinterpret_cast<const Element*>(scratch.b), c);
    part.accumulate = true;
  }
}

/// Contiguous rows of what the library multiplies.
void NarrowProduct::convert(const TensorView& operand, std::int64_t leading, std::int64_t row, std::int64_t column,
                            std::int64_t rows, std::int64_t columns, const Scratch& scratch, void* to) const {
  for (std::int64_t r = 0; r < rows; ++r) {
    const void* from = element(operand, (row + r) * leading + column);
    if (bf16_elements_) {  // of fp32: bf16 is read in place
      narrow(tables_, static_cast<const float*>(from), DType::bf16, static_cast<std::uint16_t*>(to) + r * columns, columns);
      continue;
    }
    float* target = static_cast<float*>(to) + r * columns;
    if (is_16bit(operand.dtype())) {
      widen(tables_, from, operand.dtype(), target, columns);
    } else {
      narrow(tables_, static_cast<const float*>(from), rounded_, scratch.rounded, columns);
      widen(tables_, scratch.rounded, rounded_, target, columns);
    }
  }
}

void NarrowProduct::finish(const Block& block, const Scratch& scratch, float* c, std::int64_t ldc) const {
  if (direct_ && !call_.bias && !call_.gelu) return;
  if (call_.bias) widen(tables_, element(call_.bias, block.column), call_.bias.dtype(), scratch.bias, block.columns);
  for (std::int64_t r = 0; r < block.rows; ++r) {
    finish_row((block.row + r) * call_.shape.ldc + block.column, block.columns, scratch, c + r * ldc);
  }
}

/// `row`: sums in fp32, for elements of c from `first` on.
void NarrowProduct::finish_row(std::int64_t first, std::int64_t count, const Scratch& scratch, float* row) const {
  const VectorOps<float>& ops = tables_.f32;
  if (call_.bias) ops.add(scratch.bias, row, count);
  if (direct_) {
    if (call_.gelu) ops.gelu_forward(row, static_cast<float*>(element(call_.gelu, first)), count);
    return;
  }
  const DType dtype = call_.c.dtype();
  auto* stored = static_cast<std::uint16_t*>(element(call_.c, first));
  if (call_.shape.accumulate) half_ops(tables_, dtype).add_to_single(stored, row, count);
  narrow(tables_, row, dtype, stored, count);
  // Of what is kept: computing it again from there gives the same bits.
  if (call_.gelu) half_ops(tables_, dtype).gelu_forward(stored, static_cast<std::uint16_t*>(element(call_.gelu, first)), count);
}

}  // namespace tandem::cpu

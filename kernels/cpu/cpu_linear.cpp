// SPDX-License-Identifier: Apache-2.0
// Linear layers and the head.
#include <fmt/format.h>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/cpu_products.h"

namespace tandem::cpu {

template <class Real>
void CpuKernels::multiply_plain(const ProductCall& call) {
  const MatrixProduct& product = call.shape;
  const BlockGrid grid = block_grid(product.m, product.n, product.k);
  pool_.run(grid.down * grid.across, [&](std::int64_t index, int) {
    const Block block = block_at(grid, product.m, product.n, index);
    const std::int64_t first = block.row * product.ldc + block.column;
    Real* c = data_of<Real>(call.c) + first;
    multiply_block(library<Real>(), product, block, data_of<const Real>(call.a), data_of<const Real>(call.b), c);
    if (call.gelu) {
      ops<Real>().bias_gelu(c, data_of<Real>(call.gelu) + first, product.ldc, data_of<Real>(call.bias) + block.column, block.rows,
                            block.columns);
    } else if (call.bias) {
      ops<Real>().bias_add(c, product.ldc, data_of<Real>(call.bias) + block.column, block.rows, block.columns);
    }
  });
}

void CpuKernels::multiply(const ProductCall& call) {
  const DType operands = call.a.dtype();
  TANDEM_CHECK(call.b.dtype() == operands, fmt::format("a product of {} and {}", name(operands), name(call.b.dtype())));
  const bool autocast = operands == DType::f32 && parts_.products != DType::f32;
  if (!autocast && !is_16bit(operands)) {
    with_real(call.a, [&]<class Real>(Real) { multiply_plain<Real>(call); });
    return;
  }
  const DType rounded = autocast ? parts_.products : operands;
  const NarrowProduct product(*parts_.tables, library<float>(), call, rounded, rounded == DType::bf16 && parts_.bf16_products);
  scratch_.reserve(product.scratch_bytes());
  pool_.run(product.grid().down * product.grid().across,
            [&](std::int64_t index, int thread) { product.compute(index, scratch_.of<std::byte>(thread)); });
}

}  // namespace tandem::cpu

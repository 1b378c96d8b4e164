// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/matmul.h"

#include <algorithm>

#include "core/error.h"

namespace tandem::cpu {
namespace {

constexpr std::int64_t kSmallestSide = 192;            // below, a library's kernels lose more than a second thread gains
constexpr std::int64_t kSmallestBlockFlops = 1 << 23;  // about 40 us of one core
constexpr std::int64_t kEnoughBlocks = 8;
constexpr std::int64_t kLargestBlockFlops = 600'000'000;  // beyond kEnoughBlocks, blocks are not made smaller than this
constexpr std::int64_t kSideUnit = 16;                    // whole registers

/// The project's own loops: the fallback where no library is installed, and the one whose order of sums is known.
class OwnLoops final : public MatrixLibrary {
 public:
  explicit OwnLoops(const VectorTables& tables) : tables_(tables) {}
  [[nodiscard]] std::string name() const override { return "own loops"; }
  [[nodiscard]] bool has_double() const override { return true; }
  void multiply(const MatrixProduct& product, const float* a, const float* b, float* c) const override {
    run(tables_.f32, product, a, b, c);
  }
  void multiply(const MatrixProduct& product, const double* a, const double* b, double* c) const override {
    run(tables_.f64, product, a, b, c);
  }

 private:
  template <class Real>
  static void run(const VectorOps<Real>& ops, const MatrixProduct& p, const Real* a, const Real* b, Real* c) {
    ops.gemm(p.m, p.n, p.k, a, p.transpose_a ? 1 : p.lda, p.transpose_a ? p.lda : 1, b, p.transpose_b ? 1 : p.ldb,
             p.transpose_b ? p.ldb : 1, c, p.ldc, p.accumulate);
  }

  const VectorTables& tables_;
};

}  // namespace

void MatrixLibrary::multiply(const MatrixProduct&, const std::uint16_t*, const std::uint16_t*, float*) const {
  TANDEM_CHECK(false, "this matrix library has no bf16 product");
}

std::unique_ptr<MatrixLibrary> make_own_library(const VectorTables& tables) { return std::make_unique<OwnLoops>(tables); }

// Cutting only the longer side of C, down to kSmallestSide, was as fast as or faster than square blocks on every shape of GPT-2
// 124M (two threads): each operand but one is packed once.
BlockGrid block_grid(std::int64_t m, std::int64_t n, std::int64_t k) {
  if (m * n == 0) return {};
  const auto count = [](std::int64_t total, std::int64_t part) { return (total + part - 1) / part; };
  const std::int64_t flops = 2 * m * n * k;
  const std::int64_t most = std::min(flops / kSmallestBlockFlops, std::max(kEnoughBlocks, flops / kLargestBlockFlops));
  std::int64_t rows = m, columns = n;
  for (std::int64_t* side : {m > n ? &rows : &columns, m > n ? &columns : &rows}) {
    while (2 * count(m, rows) * count(n, columns) <= most && *side / 2 >= kSmallestSide) {
      *side = count(*side / 2, kSideUnit) * kSideUnit;
    }
  }
  return {rows, columns, count(m, rows), count(n, columns)};
}

Block block_at(const BlockGrid& grid, std::int64_t m, std::int64_t n, std::int64_t index) {
  const std::int64_t row = index / grid.across * grid.rows_per_block;
  const std::int64_t column = index % grid.across * grid.columns_per_block;
  return {row, column, std::min(grid.rows_per_block, m - row), std::min(grid.columns_per_block, n - column)};
}

}  // namespace tandem::cpu

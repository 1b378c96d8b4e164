// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/matmul.h"

#include <algorithm>

namespace tandem::cpu {
namespace {

constexpr std::int64_t kMostBlocks = 16;
constexpr std::int64_t kSmallestSide = 128;            // below, a library's kernels lose more than a second thread gains
constexpr std::int64_t kSmallestBlockFlops = 1 << 23;  // about 40 us of one core
constexpr std::int64_t kSideUnit = 16;                 // whole registers

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

std::unique_ptr<MatrixLibrary> make_own_library(const VectorTables& tables) { return std::make_unique<OwnLoops>(tables); }

BlockGrid block_grid(std::int64_t m, std::int64_t n, std::int64_t k) {
  std::int64_t rows = m, columns = n;
  const auto count = [](std::int64_t total, std::int64_t part) { return (total + part - 1) / part; };
  const auto halved = [](std::int64_t side) { return (side / 2 + kSideUnit - 1) / kSideUnit * kSideUnit; };
  while (rows * columns > 0 && count(m, rows) * count(n, columns) < kMostBlocks) {
    std::int64_t& side = rows > columns ? rows : columns;
    if (side < 2 * kSmallestSide || rows * columns * 2 * k < 2 * kSmallestBlockFlops) break;
    side = halved(side);
  }
  if (rows * columns == 0) return {};
  return {rows, columns, count(m, rows), count(n, columns)};
}

Block block_at(const BlockGrid& grid, std::int64_t m, std::int64_t n, std::int64_t index) {
  const std::int64_t row = index / grid.across * grid.rows_per_block;
  const std::int64_t column = index % grid.across * grid.columns_per_block;
  return {row, column, std::min(grid.rows_per_block, m - row), std::min(grid.columns_per_block, n - column)};
}

}  // namespace tandem::cpu

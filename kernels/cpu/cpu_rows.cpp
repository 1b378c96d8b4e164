// SPDX-License-Identifier: Apache-2.0
// Rows of tables picked by index.
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 14;
constexpr std::int64_t kColumnGrain = 128;

std::int64_t tokens_per_piece(std::int64_t width) { return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width)); }

/// Checks x [tokens, width], the table [any, width] and that the indices point into it; returns the width.
std::int64_t check_rows(std::span<const std::int32_t> indices, std::int64_t tokens, const TensorView& table,
                        std::string_view operand, const TensorView& x) {
  const std::int64_t width = x.num_elements() / tokens;
  expect(x, operand, x.dtype(), {tokens, width});
  const std::int64_t rows = width == 0 ? 0 : rows_of(table, "table", width);
  TANDEM_CHECK(rows == 0 || table.dtype() == x.dtype());
  for (std::size_t i = 0; i < indices.size(); ++i) {
    TANDEM_CHECK(indices[i] < rows, fmt::format("row {} at {} of a table of {}", indices[i], i, rows));
  }
  return width;
}

}  // namespace

void CpuKernels::gather_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const std::int64_t width = check_rows(ids, tokens, table, "out", out);
  with_real(out, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int) {
      const std::size_t row_bytes = static_cast<std::size_t>(width) * sizeof(Real);
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int32_t id = ids[static_cast<std::size_t>(t)];
        Real* row = data_of<Real>(out) + t * width;
        if (id < 0) {
          std::memset(row, 0, row_bytes);
        } else {
          std::memcpy(row, data_of<Real>(table) + id * width, row_bytes);
        }
      }
    });
  });
}

void CpuKernels::add_gathered_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const std::int64_t width = check_rows(ids, tokens, table, "out", out);
  with_real(out, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().add_gathered_rows(ids.data() + begin, data_of<Real>(table), data_of<Real>(out) + begin * width, end - begin,
                                    width);
    });
  });
}

void CpuKernels::scatter_add_rows(std::span<const std::int32_t> ids, TensorView x, TensorView table) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const std::int64_t width = check_rows(ids, tokens, table, "x", x);
  // Threads share the columns: each sees all tokens, in order, whatever the number of threads.
  with_real(x, [&]<class Real>(Real) {
    pool_.run_pieces(width, kColumnGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().scatter_add_rows(ids.data(), data_of<Real>(x), data_of<Real>(table), tokens, width, begin, end);
    });
  });
}

void CpuKernels::combine_rows(std::span<const std::int32_t> slots, TensorView gates, TensorView y, TensorView out) {
  if (slots.empty()) return;
  const std::int64_t choices = gates.dim(gates.num_dims() - 1), tokens = rows_of(gates, "gates", choices);
  TANDEM_CHECK(static_cast<std::int64_t>(slots.size()) == tokens * choices && gates.dtype() == out.dtype());
  const std::int64_t width = check_rows(slots, tokens, y, "out", out);
  with_real(out, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().combine_rows(slots.data() + begin * choices, data_of<Real>(gates) + begin * choices, data_of<Real>(y),
                               data_of<Real>(out) + begin * width, end - begin, choices, width);
    });
  });
}

void CpuKernels::combine_rows_backward(std::span<const std::int32_t> slots, TensorView gates, TensorView dout, TensorView y,
                                       TensorView dgates, TensorView dy) {
  if (slots.empty()) return;
  const std::int64_t choices = gates.dim(gates.num_dims() - 1), tokens = rows_of(gates, "gates", choices);
  TANDEM_CHECK(static_cast<std::int64_t>(slots.size()) == tokens * choices && gates.dtype() == dout.dtype());
  const std::int64_t width = check_rows(slots, tokens, y, "dout", dout);
  expect(dgates, "dgates", dout.dtype(), {tokens, choices});
  TANDEM_CHECK(dy.num_elements() == y.num_elements() && (dy.num_elements() == 0 || dy.dtype() == dout.dtype()));
  // A slot belongs to one token at most, so that no two threads write the same row of dy.
  with_real(dout, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().combine_rows_backward(slots.data() + begin * choices, data_of<Real>(gates) + begin * choices,
                                        data_of<Real>(dout) + begin * width, data_of<Real>(y),
                                        data_of<Real>(dgates) + begin * choices, data_of<Real>(dy), end - begin, choices, width);
    });
  });
}

}  // namespace tandem::cpu

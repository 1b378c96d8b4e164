// SPDX-License-Identifier: Apache-2.0
// Rows of tables picked by index: checks, sorting, launches. Indices are host values, so that a wrong one is refused before
// anything is launched.
#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/rows_kernels.h"
#include "kernels/operand_checks.h"

namespace tandem::TANDEM_GPU {
namespace {

/// RowRuns on the host, its three arrays one after the other: a stable counting sort of the tokens that have a row.
std::vector<std::int32_t> sort_into_runs(std::span<const std::int32_t> ids, std::int64_t table_rows) {
  const std::size_t tokens = ids.size();
  std::vector<std::int32_t> runs(3 * tokens + 1, 0);
  std::int32_t* const order = runs.data();
  std::int32_t* const begins = order + tokens;
  std::int32_t* const rows = begins + tokens + 1;
  std::vector<std::int32_t> next(static_cast<std::size_t>(table_rows) + 1, 0);  // where the next token of a row goes
  for (const std::int32_t id : ids) {
    if (id >= 0) ++next[static_cast<std::size_t>(id) + 1];
  }
  std::size_t run = 0;
  for (std::size_t row = 0; row < static_cast<std::size_t>(table_rows); ++row) {
    if (next[row + 1] > 0) {
      begins[run] = next[row];
      rows[run++] = static_cast<std::int32_t>(row);
    }
    next[row + 1] += next[row];
  }
  std::fill(begins + run, begins + tokens + 1, next[static_cast<std::size_t>(table_rows)]);
  for (std::size_t t = 0; t < tokens; ++t) {
    if (ids[t] >= 0) order[next[static_cast<std::size_t>(ids[t])]++] = static_cast<std::int32_t>(t);
  }
  return runs;
}
RowRuns runs_at(const std::int32_t* uploaded, std::int64_t tokens) {
  return {uploaded, uploaded + tokens, uploaded + 2 * tokens + 1};
}

/// Tokens of the choices' gates, checked.
CombineSize check_combine(std::span<const std::int32_t> slots, const TensorView& gates, const TensorView& y,
                          std::string_view operand, const TensorView& x) {
  const std::int64_t choices = gates.dim(gates.num_dims() - 1), tokens = rows_of(gates, "gates", choices);
  TANDEM_CHECK(static_cast<std::int64_t>(slots.size()) == tokens * choices && gates.dtype() == wide(x.dtype()));
  return {check_rows(slots, tokens, y, operand, x), choices};
}

}  // namespace

void CudaKernels::embedding_forward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView wte,
                                    TensorView wpe, TensorView out) {
  const TokenRows size = check_embedding(ids, positions, wte, wpe, out);
  if (size.tokens == 0) return;
  launch_embedding(size, upload(ids), upload(positions), wte.data(), wpe.data(), out.data(), stream());
}

void CudaKernels::embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView dout,
                                     TensorView dwte, TensorView dwpe) {
  const TokenRows size = check_embedding_backward(ids, positions, dout, dwte, dwpe);
  if (size.tokens == 0) return;
  const auto scatter = [&](std::span<const std::int32_t> rows, const TensorView& table) {
    const std::vector<std::int32_t> runs = sort_into_runs(rows, table.dim(0));
    const std::int32_t* const uploaded = upload(std::span<const std::int32_t>(runs));
    launch_scatter_add(size, runs_at(uploaded, size.tokens), dout.data(), table.dtype(), table.data(), stream());
  };
  scatter(ids, dwte);
  scatter(positions, dwpe);
}

void CudaKernels::gather_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const TokenRows size = check_rows(ids, tokens, table, "out", out);
  launch_gather(size, upload(ids), table.data(), out.data(), stream());
}

void CudaKernels::add_gathered_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const TokenRows size = check_rows(ids, tokens, table, "out", out);
  launch_add_gathered(size, upload(ids), table.data(), out.data(), stream());
}

void CudaKernels::scatter_add_rows(std::span<const std::int32_t> ids, TensorView x, TensorView table) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const TokenRows size = check_rows(ids, tokens, table, "x", x, TableUse::accumulated);
  if (size.width == 0) return;
  const std::vector<std::int32_t> runs = sort_into_runs(ids, table.num_elements() / size.width);
  const std::int32_t* const uploaded = upload(std::span<const std::int32_t>(runs));
  launch_scatter_add(size, runs_at(uploaded, tokens), x.data(), table.dtype(), table.data(), stream());
}

void CudaKernels::combine_rows(std::span<const std::int32_t> slots, TensorView gates, TensorView y, TensorView out) {
  if (slots.empty()) return;
  const CombineSize size = check_combine(slots, gates, y, "out", out);
  launch_combine(size, upload(slots), gates.data(), y.data(), out.data(), stream());
}

void CudaKernels::combine_rows_backward(std::span<const std::int32_t> slots, TensorView gates, TensorView dout, TensorView y,
                                        TensorView dgates, TensorView dy) {
  if (slots.empty()) return;
  const CombineSize size = check_combine(slots, gates, y, "dout", dout);
  expect(dgates, "dgates", gates.dtype(), {size.rows.tokens, size.choices});
  TANDEM_CHECK(dy.num_elements() == y.num_elements() && (dy.num_elements() == 0 || dy.dtype() == dout.dtype()));
  launch_combine_backward(size, upload(slots), gates.data(), dout.data(), y.data(), dgates.data(), dy.data(), stream());
}

}  // namespace tandem::TANDEM_GPU

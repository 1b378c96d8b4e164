// SPDX-License-Identifier: Apache-2.0
// Rows of tables picked by index.
#include <algorithm>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 14;
constexpr std::int64_t kColumnGrain = 128;

std::int64_t tokens_per_piece(std::int64_t width) { return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width)); }

/// The rows of a token's slots, widened side by side, under slot numbers that say so.
class TokenSlots {
 public:
  explicit TokenSlots(std::int64_t choices) : choices_(choices), local_(static_cast<std::size_t>(choices)) {}

  [[nodiscard]] const std::int32_t* local() const { return local_.data(); }
  const float* widen(const VectorTables& tables, std::span<const std::int32_t> slots, std::int64_t token, const TensorView& y,
                     std::int64_t width, float* memory) {
    for (std::int64_t k = 0; k < choices_; ++k) {
      const std::int32_t slot = slots[static_cast<std::size_t>(token * choices_ + k)];
      local_[static_cast<std::size_t>(k)] = slot < 0 ? -1 : static_cast<std::int32_t>(k);
      if (slot >= 0) cpu::widen(tables, element(y, slot * width), y.dtype(), memory + k * width, width);
    }
    return memory;
  }
  void narrow(const VectorTables& tables, std::span<const std::int32_t> slots, std::int64_t token, const float* memory,
              const TensorView& y, std::int64_t width) const {
    for (std::int64_t k = 0; k < choices_; ++k) {
      const std::int32_t slot = slots[static_cast<std::size_t>(token * choices_ + k)];
      if (slot >= 0) cpu::narrow(tables, memory + k * width, y.dtype(), element(y, slot * width), width);
    }
  }

 private:
  std::int64_t choices_;
  std::vector<std::int32_t> local_;
};

}  // namespace

void CpuKernels::gather_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const std::int64_t width = check_rows(ids, tokens, table, "out", out).width;
  pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int) {
    const std::size_t row_bytes = static_cast<std::size_t>(width) * size_bytes(out.dtype());
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int32_t id = ids[static_cast<std::size_t>(t)];
      void* row = element(out, t * width);
      if (id < 0) {
        std::memset(row, 0, row_bytes);
      } else {
        std::memcpy(row, element(table, id * width), row_bytes);
      }
    }
  });
}

void CpuKernels::add_gathered_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const std::int64_t width = check_rows(ids, tokens, table, "out", out).width;
  if (is_16bit(out.dtype())) {
    pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int32_t id = ids[static_cast<std::size_t>(t)];
        std::uint16_t* row = halves(out, t * width);
        if (id >= 0) half_ops(out.dtype()).sum(row, halves(table, id * width), row, width);
      }
    });
    return;
  }
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
  const std::int64_t width = check_rows(ids, tokens, table, "x", x, TableUse::accumulated).width;
  if (is_16bit(x.dtype())) {
    add_widened_rows(ids, x, table, width);
    return;
  }
  // Threads share the columns: each sees all tokens, in order, whatever the number of threads.
  with_real(x, [&]<class Real>(Real) {
    pool_.run_pieces(width, kColumnGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().scatter_add_rows(ids.data(), data_of<Real>(x), data_of<Real>(table), tokens, width, begin, end);
    });
  });
}

void CpuKernels::add_widened_rows(std::span<const std::int32_t> ids, const TensorView& x, const TensorView& table,
                                  std::int64_t width) {
  // One thread adds all that a row of the table gets, in order of t: a 16-bit row is rounded once, after its last sum.
  std::vector<std::int32_t> order;
  for (std::size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] >= 0) order.push_back(static_cast<std::int32_t>(t));
  }
  const auto id_of = [&](std::size_t i) { return ids[static_cast<std::size_t>(order[i])]; };
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
  });
  std::vector<std::size_t> runs;  // where those of another row begin
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || id_of(i) != id_of(i - 1)) runs.push_back(i);
  }
  const auto num_runs = static_cast<std::int64_t>(runs.size());
  runs.push_back(order.size());
  scratch_.reserve(Pieces::bytes(1, width));
  pool_.run_pieces(num_runs, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int thread) {
    for (auto run = static_cast<std::size_t>(begin); run < static_cast<std::size_t>(end); ++run) {
      Pieces row = pieces(thread);
      float* sum = row.update<float>(table, id_of(runs[run]) * width, width);
      for (std::size_t i = runs[run]; i < runs[run + 1]; ++i) {
        half_ops(x.dtype()).add_to_single(halves(x, order[i] * width), sum, width);
      }
      row.store();
    }
  });
}

void CpuKernels::combine_rows(std::span<const std::int32_t> slots, TensorView gates, TensorView y, TensorView out) {
  if (slots.empty()) return;
  const std::int64_t choices = gates.dim(gates.num_dims() - 1), tokens = rows_of(gates, "gates", choices);
  TANDEM_CHECK(static_cast<std::int64_t>(slots.size()) == tokens * choices && gates.dtype() == wide(out.dtype()));
  const std::int64_t width = check_rows(slots, tokens, y, "out", out).width;
  if (is_16bit(out.dtype())) {
    scratch_.reserve(Pieces::bytes(choices + 1, width));
    pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int thread) {
      TokenSlots token(choices);
      for (std::int64_t t = begin; t < end; ++t) {
        Pieces rows = pieces(thread);
        const float* from = token.widen(*parts_.tables, slots, t, y, width, rows.take(choices * width));
        ops<float>().combine_rows(token.local(), data_of<float>(gates) + t * choices, from,
                                  rows.write<float>(out, t * width, width), 1, choices, width);
        rows.store();
      }
    });
    return;
  }
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
  TANDEM_CHECK(static_cast<std::int64_t>(slots.size()) == tokens * choices && gates.dtype() == wide(dout.dtype()));
  const std::int64_t width = check_rows(slots, tokens, y, "dout", dout).width;
  expect(dgates, "dgates", gates.dtype(), {tokens, choices});
  TANDEM_CHECK(dy.num_elements() == y.num_elements() && (dy.num_elements() == 0 || dy.dtype() == dout.dtype()));
  // A slot belongs to one token at most, so that no two threads write the same row of dy.
  if (is_16bit(dout.dtype())) {
    scratch_.reserve(Pieces::bytes(2 * choices + 1, width));
    pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int thread) {
      TokenSlots token(choices);
      for (std::int64_t t = begin; t < end; ++t) {
        Pieces rows = pieces(thread);
        const float* gradient = rows.read<float>(dout, t * width, width);
        const float* from = token.widen(*parts_.tables, slots, t, y, width, rows.take(choices * width));
        float* to = rows.take(choices * width);
        ops<float>().combine_rows_backward(token.local(), data_of<float>(gates) + t * choices, gradient, from,
                                           data_of<float>(dgates) + t * choices, to, 1, choices, width);
        token.narrow(*parts_.tables, slots, t, to, dy, width);
      }
    });
    return;
  }
  with_real(dout, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, tokens_per_piece(width), [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().combine_rows_backward(slots.data() + begin * choices, data_of<Real>(gates) + begin * choices,
                                        data_of<Real>(dout) + begin * width, data_of<Real>(y),
                                        data_of<Real>(dgates) + begin * choices, data_of<Real>(dy), end - begin, choices, width);
    });
  });
}

}  // namespace tandem::cpu

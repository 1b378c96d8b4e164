// SPDX-License-Identifier: Apache-2.0
// Dropout and the loss.
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/batch.h"
#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {
void CpuKernels::apply_dropout(const DropoutSpec& dropout, const TensorView& x, const TensorView& residual,
                               const TensorView& out) {
  constexpr std::int64_t kGrain = 1 << 13;  // elements that a thread takes at once: several short rows, or a part of a long one
  const auto rows = static_cast<std::int64_t>(dropout.row_ids.size());
  const std::int64_t count = x.num_elements();
  TANDEM_CHECK(rows > 0 && count % rows == 0, fmt::format("{} elements in {} rows", count, rows));
  const std::int64_t per_row = count / rows, per_row_pieces = (per_row + kGrain - 1) / kGrain;
  const std::int64_t group = std::max<std::int64_t>(1, kGrain / per_row);
  TANDEM_CHECK(per_row <= dropout.row_elements, fmt::format("{} of {} mask elements per row", per_row, dropout.row_elements));
  const MaskKey mask = mask_key(dropout);
  const std::int64_t step = chunk_items(x.dtype(), kGrain, 1);
  if (is_16bit(x.dtype())) scratch_.reserve(Pieces::bytes(3, step));
  const auto apply = [&](std::int64_t row, std::int64_t begin, std::int64_t length, int thread) {
    const std::int64_t local = row * per_row + begin;
    const std::int64_t global = dropout.row_ids[static_cast<std::size_t>(row)] * dropout.row_elements + begin;
    with_arithmetic(x, [&]<class Real>(Real) {
      const auto keep_scale = static_cast<Real>(1.0 / (1.0 - dropout.probability));
      for_chunks(0, length, step, [&](std::int64_t first, std::int64_t elements) {
        Pieces piece = pieces(thread);
        const Real* from = piece.read<Real>(x, local + first, elements);
        const Real* base = piece.read<Real>(residual, local + first, elements);
        ops<Real>().dropout(mask, static_cast<std::uint64_t>(global + first), keep_scale, from, base,
                            piece.write<Real>(out, local + first, elements), elements);
        piece.store();
      });
    });
  };
  if (group == 1) {
    pool_.run(rows * per_row_pieces, [&](std::int64_t item, int thread) {
      const std::int64_t begin = item % per_row_pieces * kGrain;
      apply(item / per_row_pieces, begin, std::min(kGrain, per_row - begin), thread);
    });
    return;
  }
  pool_.run_pieces(rows, group, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t row = begin; row < end;) {
      // Rows whose mask elements follow each other are one long row: no Philox block is made twice at their border.
      std::int64_t next = row + 1;
      while (next < end && per_row == dropout.row_elements &&
             dropout.row_ids[static_cast<std::size_t>(next)] == dropout.row_ids[static_cast<std::size_t>(next - 1)] + 1) {
        ++next;
      }
      apply(row, 0, (next - row) * per_row, thread);
      row = next;
    }
  });
}

void CpuKernels::dropout_residual_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out) {
  const std::int64_t count = x.num_elements();
  TANDEM_CHECK(out.dtype() == x.dtype() && out.num_elements() == count);
  TANDEM_CHECK(!residual || (residual.dtype() == x.dtype() && residual.num_elements() == count));
  if (count == 0) return;
  if (dropout.probability > 0) {
    apply_dropout(dropout, x, residual, out);
    return;
  }
  constexpr std::int64_t kGrain = 1 << 14;
  with_arithmetic(x, [&]<class Real>(Real) {
    if (residual) {
      pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
        if (is_16bit(x.dtype())) {
          half_ops(x.dtype()).sum(halves(x, begin), halves(residual, begin), halves(out, begin), end - begin);
        } else {
          ops<Real>().sum(data_of<Real>(x) + begin, data_of<Real>(residual) + begin, data_of<Real>(out) + begin, end - begin);
        }
      });
    } else if (x.data() != out.data()) {
      pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
        std::memcpy(element(out, begin), element(x, begin), static_cast<std::size_t>(end - begin) * size_bytes(x.dtype()));
      });
    }
  });
}

void CpuKernels::dropout_backward(const DropoutSpec& dropout, TensorView dout, TensorView dx) {
  dropout_residual_forward(dropout, dout, {}, dx);
}

double CpuKernels::cross_entropy(TensorView logits, std::span<const std::int32_t> targets, const double* scale) {
  const auto tokens = static_cast<std::int64_t>(targets.size());
  if (tokens == 0) return 0;
  const std::int64_t vocabulary = logits.num_elements() / tokens;
  expect(logits, "logits", logits.dtype(), {tokens, vocabulary});
  expect_targets(targets, vocabulary);
  std::vector<double> losses(targets.size(), 0.0);
  if (is_16bit(logits.dtype())) scratch_.reserve(Pieces::bytes(1, vocabulary));
  with_arithmetic(logits, [&]<class Real>(Real) {
    pool_.run(tokens, [&](std::int64_t t, int thread) {
      const std::int32_t target = targets[static_cast<std::size_t>(t)];
      double& loss = losses[static_cast<std::size_t>(t)];
      Pieces piece = pieces(thread);
      const std::int64_t first = t * vocabulary;
      if (target == kIgnoredTarget) {
        if (scale != nullptr) ops<Real>().fill(piece.write<Real>(logits, first, vocabulary), Real(0), vocabulary);
      } else if (scale != nullptr && is_16bit(logits.dtype())) {
        loss = half_ops(logits.dtype())
                   .cross_entropy_gradient(halves(logits, first), vocabulary, target, static_cast<float>(*scale),
                                           piece.take(vocabulary));
      } else if (scale != nullptr) {
        Real* row = piece.update<Real>(logits, first, vocabulary);
        loss = ops<Real>().cross_entropy_gradient(row, vocabulary, target, static_cast<Real>(*scale));
      } else {
        loss = ops<Real>().cross_entropy(piece.read<Real>(logits, first, vocabulary), vocabulary, target);
      }
      piece.store();
    });
  });
  double total = 0;
  for (const double loss : losses) total += loss;
  return total;
}

double CpuKernels::cross_entropy_forward_backward(TensorView logits, std::span<const std::int32_t> targets, double scale) {
  return cross_entropy(logits, targets, &scale);
}

double CpuKernels::cross_entropy_forward(TensorView logits, std::span<const std::int32_t> targets) {
  return cross_entropy(logits, targets, nullptr);
}

void CpuKernels::cross_entropy_statistics(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                          TensorView statistics) {
  const auto tokens = static_cast<std::int64_t>(targets.size());
  if (tokens == 0) return;
  const std::int64_t width = logits.num_elements() / tokens;
  expect(logits, "logits", logits.dtype(), {tokens, width});
  expect(statistics, "statistics", wide(logits.dtype()), {tokens, 3});
  expect_columns(columns, width, targets);
  if (is_16bit(logits.dtype())) scratch_.reserve(Pieces::bytes(1, columns));
  with_arithmetic(logits, [&]<class Real>(Real) {
    pool_.run(tokens, [&](std::int64_t t, int thread) {
      const std::int32_t target = targets[static_cast<std::size_t>(t)];
      const Real* row = pieces(thread).read<Real>(logits, t * width, columns);
      Real* result = data_of<Real>(statistics) + t * 3;
      ops<Real>().softmax_statistics(row, columns, result);
      result[2] = target < 0 ? Real(0) : row[target];
    });
  });
}

void CpuKernels::cross_entropy_gradient(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                        std::span<const std::uint8_t> valid, TensorView logsumexp, double scale) {
  const auto tokens = static_cast<std::int64_t>(targets.size());
  TANDEM_CHECK(valid.size() == targets.size());
  if (tokens == 0) return;
  const std::int64_t width = logits.num_elements() / tokens;
  expect(logits, "logits", logits.dtype(), {tokens, width});
  expect_count(logsumexp, "logsumexp", wide(logits.dtype()), tokens);
  expect_columns(columns, width, targets);
  if (is_16bit(logits.dtype())) scratch_.reserve(Pieces::bytes(1, width));
  with_arithmetic(logits, [&]<class Real>(Real) {
    pool_.run(tokens, [&](std::int64_t t, int thread) {
      const auto token = static_cast<std::size_t>(t);
      const std::int64_t used = valid[token] != 0 ? columns : 0;
      Pieces piece = pieces(thread);
      Real* row = piece.update<Real>(logits, t * width, width);
      ops<Real>().softmax_scaled(row, used, data_of<Real>(logsumexp)[t], static_cast<Real>(scale));
      if (used > 0 && targets[token] >= 0) row[targets[token]] -= static_cast<Real>(scale);
      ops<Real>().fill(row + used, Real(0), width - used);
      piece.store();
    });
  });
}

}  // namespace tandem::cpu

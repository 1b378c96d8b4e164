// SPDX-License-Identifier: Apache-2.0
// Dropout and the loss.
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/batch.h"
#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {
namespace {

void check_columns(std::int64_t columns, std::int64_t width, std::span<const std::int32_t> targets) {
  TANDEM_CHECK(columns >= 0 && columns <= width, fmt::format("{} columns of {}", columns, width));
  for (std::size_t t = 0; t < targets.size(); ++t) {
    TANDEM_CHECK(targets[t] < columns, fmt::format("target {} at {} is outside the {} columns", targets[t], t, columns));
  }
}

}  // namespace

template <class Real>
void CpuKernels::apply_dropout(const DropoutSpec& dropout, const Real* x, const Real* residual, Real* out, std::int64_t count) {
  constexpr std::int64_t kGrain = 1 << 13;  // elements that a thread takes at once: several short rows, or a part of a long one
  const auto rows = static_cast<std::int64_t>(dropout.row_ids.size());
  TANDEM_CHECK(rows > 0 && count % rows == 0, fmt::format("{} elements in {} rows", count, rows));
  const std::int64_t per_row = count / rows, pieces = (per_row + kGrain - 1) / kGrain;
  const std::int64_t group = std::max<std::int64_t>(1, kGrain / per_row);
  TANDEM_CHECK(per_row <= dropout.row_elements, fmt::format("{} of {} mask elements per row", per_row, dropout.row_elements));
  const MaskKey mask = mask_key(dropout);
  const auto keep_scale = static_cast<Real>(1.0 / (1.0 - dropout.probability));
  const auto apply = [&](std::int64_t row, std::int64_t begin, std::int64_t length) {
    const std::int64_t local = row * per_row + begin;
    const auto global = static_cast<std::uint64_t>(dropout.row_ids[static_cast<std::size_t>(row)] * dropout.row_elements + begin);
    ops<Real>().dropout(mask, global, keep_scale, x + local, residual == nullptr ? nullptr : residual + local, out + local,
                        length);
  };
  if (group == 1) {
    pool_.run(rows * pieces, [&](std::int64_t item, int) {
      const std::int64_t begin = item % pieces * kGrain;
      apply(item / pieces, begin, std::min(kGrain, per_row - begin));
    });
    return;
  }
  pool_.run_pieces(rows, group, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end;) {
      // Rows whose mask elements follow each other are one long row: no Philox block is made twice at their border.
      std::int64_t next = row + 1;
      while (next < end && per_row == dropout.row_elements &&
             dropout.row_ids[static_cast<std::size_t>(next)] == dropout.row_ids[static_cast<std::size_t>(next - 1)] + 1) {
        ++next;
      }
      apply(row, 0, (next - row) * per_row);
      row = next;
    }
  });
}

void CpuKernels::dropout_residual_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out) {
  const std::int64_t count = x.num_elements();
  TANDEM_CHECK(out.dtype() == x.dtype() && out.num_elements() == count);
  TANDEM_CHECK(!residual || (residual.dtype() == x.dtype() && residual.num_elements() == count));
  if (count == 0) return;
  with_real(x, [&]<class Real>(Real) {
    const Real* from = data_of<Real>(x);
    const Real* base = residual ? data_of<Real>(residual) : nullptr;
    Real* to = data_of<Real>(out);
    if (dropout.probability > 0) {
      apply_dropout(dropout, from, base, to, count);
      return;
    }
    constexpr std::int64_t kGrain = 1 << 14;
    pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      if (base != nullptr) {
        ops<Real>().sum(from + begin, base + begin, to + begin, end - begin);
      } else if (from != to) {
        std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin) * sizeof(Real));
      }
    });
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
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const bool valid = targets[t] == kIgnoredTarget || (targets[t] >= 0 && targets[t] < vocabulary);
    TANDEM_CHECK(valid, fmt::format("target {} at {} is outside the vocabulary of {}", targets[t], t, vocabulary));
  }
  std::vector<double> losses(targets.size(), 0.0);
  with_real(logits, [&]<class Real>(Real) {
    pool_.run(tokens, [&](std::int64_t t, int) {
      const std::int32_t target = targets[static_cast<std::size_t>(t)];
      Real* row = data_of<Real>(logits) + t * vocabulary;
      double& loss = losses[static_cast<std::size_t>(t)];
      if (target == kIgnoredTarget) {
        if (scale != nullptr) ops<Real>().fill(row, Real(0), vocabulary);
      } else if (scale != nullptr) {
        loss = ops<Real>().cross_entropy_gradient(row, vocabulary, target, static_cast<Real>(*scale));
      } else {
        loss = ops<Real>().cross_entropy(row, vocabulary, target);
      }
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
  expect(statistics, "statistics", logits.dtype(), {tokens, 3});
  check_columns(columns, width, targets);
  with_real(logits, [&]<class Real>(Real) {
    pool_.run(tokens, [&](std::int64_t t, int) {
      const std::int32_t target = targets[static_cast<std::size_t>(t)];
      const Real* row = data_of<Real>(logits) + t * width;
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
  TANDEM_CHECK(logsumexp.dtype() == logits.dtype() && logsumexp.num_elements() == tokens);
  check_columns(columns, width, targets);
  with_real(logits, [&]<class Real>(Real) {
    pool_.run(tokens, [&](std::int64_t t, int) {
      const auto token = static_cast<std::size_t>(t);
      Real* row = data_of<Real>(logits) + t * width;
      const std::int64_t used = valid[token] != 0 ? columns : 0;
      ops<Real>().softmax_scaled(row, used, data_of<Real>(logsumexp)[t], static_cast<Real>(scale));
      if (used > 0 && targets[token] >= 0) row[targets[token]] -= static_cast<Real>(scale);
      ops<Real>().fill(row + used, Real(0), width - used);
    });
  });
}

}  // namespace tandem::cpu

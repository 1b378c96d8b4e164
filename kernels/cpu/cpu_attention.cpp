// SPDX-License-Identifier: Apache-2.0
// Attention, dropout and the loss.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "core/batch.h"
#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {
namespace {

void check_attention(const AttentionShape& shape, const DropoutSpec& dropout) {
  TANDEM_CHECK(shape.rows >= 0 && shape.sequence >= 0 && shape.heads > 0 && shape.head_size > 0);
  const std::span<const std::int32_t> starts = shape.document_starts;
  TANDEM_CHECK(starts.empty() || static_cast<std::int64_t>(starts.size()) == shape.rows * shape.sequence);
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const std::int64_t position = static_cast<std::int64_t>(i) % shape.sequence;
    TANDEM_CHECK(starts[i] >= 0 && starts[i] <= position, fmt::format("document start {} of position {}", starts[i], position));
  }
  if (dropout.probability > 0) {
    TANDEM_CHECK(static_cast<std::int64_t>(dropout.row_ids.size()) == shape.rows);
    TANDEM_CHECK(shape.dropout_sequence >= shape.sequence, "dropout_sequence is the model's full sequence");
  }
}

}  // namespace

template <class Real>
void CpuKernels::attention(bool backward, const AttentionShape& shape, const DropoutSpec& dropout, Real* qkv, Real* out,
                           Real* logsumexp, const Real* dout, Real* dqkv) {
  const std::int64_t width = shape.heads * shape.head_size, tokens_of_row = shape.sequence;
  const MaskKey mask = mask_key(dropout);
  const VectorOps<Real>& loops = ops<Real>();
  scratch_.reserve(static_cast<std::size_t>(loops.attention_scratch(shape.sequence, shape.head_size)) * sizeof(Real));

  pool_.run(shape.rows * shape.heads, [&](std::int64_t item, int thread) {
    const std::int64_t row = item / shape.heads, index = item % shape.heads;
    const std::int64_t first = row * tokens_of_row, channel = index * shape.head_size;
    AttentionHead<Real> head = {};
    head.sequence = shape.sequence;
    head.head_size = shape.head_size;
    head.qkv_stride = 3 * width;
    head.out_stride = width;
    head.document_starts = shape.document_starts.empty() ? nullptr : shape.document_starts.data() + first;
    head.q = qkv + first * head.qkv_stride + channel;
    head.k = head.q + width;
    head.v = head.k + width;
    head.out = out + first * width + channel;
    head.logsumexp = logsumexp + item * shape.sequence;
    head.scale = static_cast<Real>(1.0 / std::sqrt(static_cast<double>(shape.head_size)));
    if (dropout.probability > 0) {
      head.mask = &mask;
      const std::int64_t square = shape.dropout_sequence * shape.dropout_sequence;
      head.mask_first_element =
          static_cast<std::uint64_t>(dropout.row_ids[static_cast<std::size_t>(row)] * dropout.row_elements + index * square);
      head.mask_row_elements = shape.dropout_sequence;
      head.keep_scale = static_cast<Real>(1.0 / (1.0 - dropout.probability));
    }
    head.scratch = scratch_.of<Real>(thread);
    if (!backward) {
      loops.attention_forward(head);
      return;
    }
    head.dout = dout + first * width + channel;
    head.dq = dqkv + first * head.qkv_stride + channel;
    head.dk = head.dq + width;
    head.dv = head.dk + width;
    loops.attention_backward(head);
  });
}

void CpuKernels::attention_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv, TensorView out,
                                   TensorView logsumexp) {
  check_attention(shape, dropout);
  const std::int64_t tokens = shape.rows * shape.sequence, width = shape.heads * shape.head_size;
  expect(qkv, "qkv", qkv.dtype(), {tokens, 3 * width});
  expect(out, "out", qkv.dtype(), {tokens, width});
  expect(logsumexp, "logsumexp", qkv.dtype(), {shape.rows, shape.heads, shape.sequence});
  if (tokens == 0) return;
  with_real(qkv, [&]<class Real>(Real) {
    attention<Real>(false, shape, dropout, data_of<Real>(qkv), data_of<Real>(out), data_of<Real>(logsumexp), nullptr, nullptr);
  });
}

void CpuKernels::attention_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout, TensorView qkv,
                                    TensorView out, TensorView logsumexp, TensorView dqkv) {
  check_attention(shape, dropout);
  const std::int64_t tokens = shape.rows * shape.sequence, width = shape.heads * shape.head_size;
  expect(qkv, "qkv", qkv.dtype(), {tokens, 3 * width});
  expect(dqkv, "dqkv", qkv.dtype(), {tokens, 3 * width});
  expect(out, "out", qkv.dtype(), {tokens, width});
  expect(dout, "dout", qkv.dtype(), {tokens, width});
  expect(logsumexp, "logsumexp", qkv.dtype(), {shape.rows, shape.heads, shape.sequence});
  if (tokens == 0) return;
  with_real(qkv, [&]<class Real>(Real) {
    attention<Real>(true, shape, dropout, data_of<Real>(qkv), data_of<Real>(out), data_of<Real>(logsumexp), data_of<Real>(dout),
                    data_of<Real>(dqkv));
  });
}

void CpuKernels::attention_decode(int heads, std::int64_t head_size, std::int64_t length, TensorView qkv, TensorView key_cache,
                                  TensorView value_cache, TensorView out) {
  const std::int64_t width = heads * head_size, rows = rows_of(qkv, "qkv", 3 * width);
  if (rows == 0) return;
  const std::int64_t capacity = key_cache.num_elements() / (rows * width);
  expect(key_cache, "key_cache", qkv.dtype(), {rows, capacity, width});
  expect(value_cache, "value_cache", qkv.dtype(), {rows, capacity, width});
  expect(out, "out", qkv.dtype(), {rows, width});
  TANDEM_CHECK(length >= 0 && length < capacity, fmt::format("{} entries set of a cache of {}", length, capacity));
  with_real(qkv, [&]<class Real>(Real) {
    scratch_.reserve(static_cast<std::size_t>(capacity) * sizeof(Real));
    const auto scale = static_cast<Real>(1.0 / std::sqrt(static_cast<double>(head_size)));
    pool_.run(rows * heads, [&](std::int64_t item, int thread) {
      const std::int64_t row = item / heads, channel = item % heads * head_size;
      const Real* query = data_of<Real>(qkv) + row * 3 * width + channel;
      Real* keys = data_of<Real>(key_cache) + row * capacity * width + channel;
      Real* values = data_of<Real>(value_cache) + row * capacity * width + channel;
      std::copy_n(query + width, head_size, keys + length * width);
      std::copy_n(query + 2 * width, head_size, values + length * width);
      ops<Real>().attention_decode(query, keys, values, length + 1, width, head_size, scale, scratch_.of<Real>(thread),
                                   data_of<Real>(out) + row * width + channel);
    });
  });
}

template <class Real>
void CpuKernels::apply_dropout(const DropoutSpec& dropout, const Real* x, const Real* residual, Real* out, std::int64_t count) {
  constexpr std::int64_t kGrain = 1 << 13;
  const auto rows = static_cast<std::int64_t>(dropout.row_ids.size());
  TANDEM_CHECK(rows > 0 && count % rows == 0, fmt::format("{} elements in {} rows", count, rows));
  const std::int64_t per_row = count / rows, pieces = (per_row + kGrain - 1) / kGrain;
  TANDEM_CHECK(per_row <= dropout.row_elements, fmt::format("{} of {} mask elements per row", per_row, dropout.row_elements));
  const MaskKey mask = mask_key(dropout);
  const auto keep_scale = static_cast<Real>(1.0 / (1.0 - dropout.probability));
  pool_.run(rows * pieces, [&](std::int64_t item, int) {
    const std::int64_t row = item / pieces, begin = item % pieces * kGrain, local = row * per_row + begin;
    const auto global = static_cast<std::uint64_t>(dropout.row_ids[static_cast<std::size_t>(row)] * dropout.row_elements + begin);
    ops<Real>().dropout(mask, global, keep_scale, x + local, residual == nullptr ? nullptr : residual + local, out + local,
                        std::min(kGrain, per_row - begin));
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

}  // namespace tandem::cpu

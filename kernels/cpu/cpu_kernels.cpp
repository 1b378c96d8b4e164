// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_kernels.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace tandem::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 14;  // elements of an elementwise operation that a thread takes at once

}  // namespace

MaskKey mask_key(const DropoutSpec& dropout) {
  const DropoutKey& key = dropout.key;
  return {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32), key.step,
          key.layer * 8 + static_cast<std::uint32_t>(key.site), dropout_threshold(dropout.probability)};
}

CpuKernels::CpuKernels(CpuParts parts, int threads, const PitfallSet& pitfalls)
    : CommonKernels(pitfalls), parts_(std::move(parts)), pool_(threads), scratch_(threads) {}

void CpuKernels::embedding_forward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView wte,
                                   TensorView wpe, TensorView out) {
  const TokenRows size = check_embedding(ids, positions, wte, wpe, out);
  const std::int64_t tokens = size.tokens, hidden = size.width;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / hidden);
  if (is_16bit(size.dtype)) {
    pool_.run_pieces(tokens, grain, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t t = begin; t < end; ++t) {
        const auto token = static_cast<std::size_t>(t);
        half_ops(size.dtype)
            .sum(halves(wte, ids[token] * hidden), halves(wpe, positions[token] * hidden), halves(out, t * hidden), hidden);
      }
    });
    return;
  }
  with_real(wte, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, grain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().embedding_forward(ids.data() + begin, positions.data() + begin, data_of<Real>(wte), data_of<Real>(wpe),
                                    data_of<Real>(out) + begin * hidden, end - begin, hidden);
    });
  });
}

void CpuKernels::embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView dout,
                                    TensorView dwte, TensorView dwpe) {
  const TokenRows size = check_embedding_backward(ids, positions, dout, dwte, dwpe);
  const std::int64_t tokens = size.tokens, hidden = size.width;
  if (is_16bit(size.dtype)) {
    add_widened_rows(ids, dout, dwte, hidden);
    add_widened_rows(positions, dout, dwpe, hidden);
    return;
  }
  // Threads share the columns: each sees all tokens, in order, whatever the number of threads.
  constexpr std::int64_t kColumns = 128;
  if (tokens == 0) return;
  with_real(dwte, [&]<class Real>(Real) {
    pool_.run_pieces(hidden, kColumns, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().embedding_backward(ids.data(), positions.data(), data_of<Real>(dout), data_of<Real>(dwte), data_of<Real>(dwpe),
                                     tokens, hidden, begin, end);
    });
  });
}

}  // namespace tandem::cpu

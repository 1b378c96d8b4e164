// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/batch.h"
#include "reference/data_parallel.h"
#include "reference/gpt.h"
#include "reference/ring_attention.h"

/// Context parallelism: C ranks hold all parameters and a slice of the tokens of every row.
///
/// A row of S tokens is cut into 2C chunks, chunk i being balanced_part(S, 2C, i); rank c holds chunks c and 2C-1-c. Under a
/// causal mask late tokens see more keys than early ones: an early and a late chunk make the ranks' work equal.
///
/// Everything but attention works on single tokens and needs no exchange. Attention is a ring (ring_attention.h): per layer all
/// ranks together send 2 (C-1) n elements forward (keys and values) and 2 (C-1) n + 2 C n backward (keys, values and their
/// gradients), n = rows * S * hidden. A rank's loss and gradients are those of its own tokens: they are summed over ranks.
namespace tandem::reference {

/// Every row is cut into 2 ranks chunks, of which rank r holds the r-th and the r-th from the end.
struct ContextParallelLayout {
  int ranks = 1;
};

/// The two chunks of rank `rank`, in ascending order of position; either may be empty.
[[nodiscard]] std::array<Interval, 2> context_chunks(std::int64_t row_tokens, int ranks, int rank);

/// The own tokens of rank `rank` of every row.
[[nodiscard]] ContextSlice context_slice(const Batch& batch, int ranks, int rank);

/// Elements that all ranks send together, by purpose.
struct ContextParallelExchanges {
  std::int64_t forward = 0;   ///< keys and values
  std::int64_t backward = 0;  ///< keys and values again, and their gradients
  friend bool operator==(const ContextParallelExchanges&, const ContextParallelExchanges&) = default;
};
/// The closed form for one micro-batch of `tokens` = rows * S tokens: forward 2 (C-1) tokens * hidden and backward
/// (4 C - 2) tokens * hidden for each layer; nothing where C is 1.
[[nodiscard]] ContextParallelExchanges context_parallel_exchanges(const GptConfig& model, std::int64_t tokens,
                                                                  ContextParallelLayout layout);

template <class Real>
struct ContextParallelStep {
  std::vector<RankGradients<Real>> ranks;  ///< each rank's own tokens, before the sum over ranks
  ContextParallelExchanges exchanges;
};

/// One micro-batch up to, but without, the sum over ranks. pass.trace and pass.multiply_adds are not looked at. Throws as
/// loss_and_gradients().
template <class Real>
[[nodiscard]] ContextParallelStep<Real> context_parallel_local_gradients(const GptConfig& model,
                                                                         const NamedTensors<Real>& parameters, const Batch& batch,
                                                                         ContextParallelLayout layout, const Pass<Real>& pass);

/// With the sum over ranks, which gives every rank the same.
template <class Real>
[[nodiscard]] RankGradients<Real> context_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                             const Batch& batch, ContextParallelLayout layout,
                                                             const Pass<Real>& pass);

}  // namespace tandem::reference

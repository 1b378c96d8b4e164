// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "core/model_config.h"

/// Recomputation. Its reference is the pass that stores everything (reference/gpt.h): computing an activation again gives the
/// number that was there before. What it costs and saves is here in closed form.
namespace tandem::reference {

struct RecomputationSize {
  std::int64_t tokens = 0;    ///< b s of one micro-batch
  std::int64_t sequence = 0;  ///< s
  int tensor_ranks = 1;       ///< t
  bool sequence_parallel = false;
  int bytes = 4;  ///< of an element
};

/// Bytes of activations of one layer that are published for 16-bit training with a stored attention matrix (Korthikanti et al.,
/// "Reducing activation recomputation in large transformer models", MLSys 2023, table 2), `mode` none, selective or full:
///   none, t = 1           s b h (34 + 5 a s / h)
///   none, t               s b h (10 + 24 / t + 5 a s / (h t))
///   none, t, sequence     s b h / t (34 + 5 a s / h)
///   selective, t          s b h (10 + 24 / t);   with sequence parallelism s b h 34 / t
///   full                  2 s b h
/// They hold for an MLP of width 4 h, 2 bytes an element and dropout masks of 1 byte. Throws ContractError for another mode.
[[nodiscard]] double published_activation_bytes(const GptConfig& model, const RecomputationSize& size, std::string_view mode);

/// The same for this program's block, whose attention keeps one number a head and token (log-sum-exp) instead of the matrix, and
/// no masks:
///   none       b s (2 h + (4 h + 2 f + heads) / t + (2 h + 4) / s')     s' = t under sequence parallelism, else 1
///   selective  b s ((4 h + f + heads) / t + (2 h + 4) / s')             outputs of both norms and of GELU are made again
///   full       b s h / s'                                               the block's output alone
[[nodiscard]] double blocked_activation_bytes(const GptConfig& model, const RecomputationSize& size, std::string_view mode);

/// FLOPs that full recomputation repeats in one block over all ranks, a multiply-add counting 2 and causal attention as causal:
///   2 b s h (4 h + (s + 1) + f)          where the block's output was kept: the last product made it
///   2 b s h (4 h + (s + 1) + 2 f)        inside a group of layers
[[nodiscard]] double recomputed_flops(const GptConfig& model, const RecomputationSize& size, bool output_kept);

}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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
  /// Attention keeps its matrix of probabilities, and no log-sum-exp.
  bool materialized = false;
  /// Of a model with experts.
  int expert_ranks = 1;                ///< e, that hold E / e experts each
  std::int64_t expert_group_rows = 0;  ///< rows of the micro-batch on all of them together; 0: e times this rank's
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

/// The same for this program's block, whose kernels keep no dropout mask. One rank's bytes of a layer, n = b s tokens, x bytes an
/// element, w = max(4, x) bytes a statistic, s' = t under sequence parallelism, else 1; a dense layer keeps
///   input of the next layer       n h x / s'                      always: all that mode full keeps
///   middle (first residual sum)   n h x / s'                      from here on: selective
///   mean and 1 / stddev of norms  4 n w / s'
///   qkv, attention's output       4 n h x / t
///   log-sum-exp of attention      n a w / t                       not where attention is materialized
///   MLP before GELU               n f x / t
///   outputs of both norms         2 n h x                         from here on: none
///   MLP after GELU                n f x / t
///   attention's matrix            n a s x / t                     where it is materialized
/// and with E experts, k choices of a token and C places for each expert and row (GptConfig::expert_capacity), O = (n / s) C
/// places of this rank for an expert and R those of all e ranks together, in place of the MLP's two lines
///   router probabilities, gates   n (E + k) w                     selective
///   experts' input, before GELU   (E / e) R (h + f / t) x
///   experts' output               E O h x
///   after GELU                    (E / e) R f x / t               none
/// Context parallelism is not counted. Throws ContractError for another mode.
[[nodiscard]] double activation_bytes(const GptConfig& model, const RecomputationSize& size, std::string_view mode);
/// activation_bytes() of blocked attention, whatever `size` says: no [s, s] matrix.
[[nodiscard]] double blocked_activation_bytes(const GptConfig& model, const RecomputationSize& size, std::string_view mode);

/// One reason why a layer keeps other bytes here than published.
struct ByteTerm {
  std::string reason;
  double bytes = 0;  ///< that are more here; negative: fewer
};
/// activation_bytes() - published_activation_bytes(), term by term, with the symbols of both and x = 2:
///   masks of residual dropout            - 2 n h / s'              none, selective: a mask is drawn again, never kept
///   mask of attention's dropout          - n a s / t               none
///   probabilities after dropout          - 2 n a s / t             none: P and the mask make them
///   probabilities                        - 2 n a s / t             none, blocked attention
///   log-sum-exp                          + 4 n a / t               none, selective; blocked attention
///   mean and 1 / stddev of both norms    + 16 n / s'               none, selective: not counted there
///   outputs of both norms                + 4 n h (1 - 1 / s')      none: whole, where they are published in slices
///                                        - 4 n h / s'              selective: made again
///   output of GELU                       - 8 n h / t               selective: made again
///   input of a layer                     - 2 n h (1 - 1 / s')      full: a slice
/// Throws ContractError for another mode, for experts, for an MLP that is not 4 h wide, and where an element is not 2 bytes.
[[nodiscard]] std::vector<ByteTerm> differences_from_published(const GptConfig& model, const RecomputationSize& size,
                                                               std::string_view mode);

/// FLOPs that full recomputation repeats in one block over all ranks, a multiply-add counting 2 and causal attention as causal:
///   2 b s h (4 h + (s + 1) + f)          where the block's output was kept: the last product made it
///   2 b s h (4 h + (s + 1) + 2 f)        inside a group of layers
[[nodiscard]] double recomputed_flops(const GptConfig& model, const RecomputationSize& size, bool output_kept);
/// The part of both that is attention's two products, 2 b s h (s + 1): all that selective recomputation repeats, and that only
/// where attention is materialized.
[[nodiscard]] double attention_core_flops(const GptConfig& model, const RecomputationSize& size);

}  // namespace tandem::reference

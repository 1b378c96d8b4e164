// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// What a step costs at scale, in closed form: the truth where a formula is exact (docs/techniques/scaling.md has each with its
/// source). Seconds, bytes, FLOPs; a link is alpha seconds a message and beta seconds a byte.
namespace tandem::reference {

/// A message of n bytes takes alpha_seconds + n beta_seconds_per_byte.
struct Link {
  double alpha_seconds = 0;
  double beta_seconds_per_byte = 0;
};

/// n ranks, `bytes` the whole tensor.
///   ring all-reduce      2 (n - 1) (alpha + beta bytes / n)         reduce-scatter, all-gather: half of it
///   tree all-reduce      2 ceil(log2 n) (alpha + beta bytes)        (not pipelined)
///   all-to-all           (n - 1) (alpha + beta bytes / n)           (bytes: what one rank sends)
[[nodiscard]] double ring_all_reduce_seconds(int ranks, double bytes, Link link);
[[nodiscard]] double ring_half_seconds(int ranks, double bytes, Link link);
[[nodiscard]] double tree_all_reduce_seconds(int ranks, double bytes, Link link);
[[nodiscard]] double all_to_all_seconds(int ranks, double bytes, Link link);
/// Reduce-scatter in nodes of `per_node`, all-reduce between nodes of a 1 / per_node part, all-gather in nodes.
[[nodiscard]] double hierarchical_all_reduce_seconds(int nodes, int per_node, double bytes, Link in_node, Link between_nodes);

/// Share of the makespan that a pipeline idles: (p - 1) / (m v + p - 1).
[[nodiscard]] double bubble_share(int ranks, int micro_batches, int chunks);

/// Bytes of model state per rank, N parameters over d ranks, K bytes of optimizer state a parameter (12: fp32 master and two
/// moments): stage 0 (4 + K) N; 1: 4 N + K N / d; 2: 2 N + (2 + K) N / d; 3: (4 + K) N / d (Rajbhandari et al., SC 2020).
[[nodiscard]] double zero_model_state_bytes(double parameters, int ranks, int stage, double optimizer_bytes = 12);

/// Activation bytes of one layer in 16 bits, Korthikanti et al., MLSys 2023, table 2.
enum class Recomputation : std::uint8_t { none, selective, full };
struct LayerSize {
  double sequence = 0, rows = 0, hidden = 0, heads = 0;  ///< rows: of one micro-batch
  int tensor = 1;                                        ///< degree of tensor parallelism
  bool sequence_parallel = false;
};
[[nodiscard]] double layer_activation_bytes(const LayerSize& layer, Recomputation recomputation);

/// FLOPs of a training step of a GPT (4 h wide MLP), attention counted in full: 72 B s L h^2 (1 + s / (6 h) + V / (12 L h)), with
/// full recomputation 96 B s L h^2 (1 + s / (6 h) + V / (16 L h)) (Narayanan et al., SC 2021).
struct GptSize {
  double rows = 0, sequence = 0, layers = 0, hidden = 0, vocabulary = 0;
};
[[nodiscard]] double gpt_step_flops(const GptSize& size, bool full_recomputation);
/// 12 L h^2 (1 + 13 / (12 h) + (V + s) / (12 L h)).
[[nodiscard]] double gpt_parameters_closed_form(const GptSize& size);

/// Gradient all-reduce over a step whose compute shrinks with the ranks (strong scaling, nothing hidden): its share of the step
/// is c(n) / (c(n) + W / n).
[[nodiscard]] double communication_share(double one_rank_compute_seconds, int ranks, double gradient_bytes, Link link);

}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
#include "reference/scaling.h"

#include <cmath>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

double message_seconds(double bytes, Link link) { return link.alpha_seconds + link.beta_seconds_per_byte * bytes; }

void require_ranks(int ranks) { TANDEM_CHECK(ranks >= 1, fmt::format("{} ranks", ranks)); }

}  // namespace

double ring_all_reduce_seconds(int ranks, double bytes, Link link) {
  require_ranks(ranks);
  return 2 * (ranks - 1) * message_seconds(bytes / ranks, link);
}

double ring_half_seconds(int ranks, double bytes, Link link) {
  require_ranks(ranks);
  return (ranks - 1) * message_seconds(bytes / ranks, link);
}

double tree_all_reduce_seconds(int ranks, double bytes, Link link) {
  require_ranks(ranks);
  int levels = 0;
  for (int reached = 1; reached < ranks; reached *= 2) ++levels;
  return 2 * levels * message_seconds(bytes, link);
}

double all_to_all_seconds(int ranks, double bytes, Link link) {
  require_ranks(ranks);
  return (ranks - 1) * message_seconds(bytes / ranks, link);
}

double hierarchical_all_reduce_seconds(int nodes, int per_node, double bytes, Link in_node, Link between_nodes) {
  const double scattered = ring_half_seconds(per_node, bytes, in_node);
  const double reduced = ring_all_reduce_seconds(nodes, bytes / per_node, between_nodes);
  const double gathered = ring_half_seconds(per_node, bytes, in_node);
  return scattered + reduced + gathered;
}

double bubble_share(int ranks, int micro_batches, int chunks) {
  TANDEM_CHECK(ranks >= 1 && micro_batches >= 1 && chunks >= 1,
               fmt::format("{} ranks, {} micro-batches, {} chunks", ranks, micro_batches, chunks));
  const double ramp = ranks - 1;
  return ramp / (static_cast<double>(micro_batches) * chunks + ramp);
}

double zero_model_state_bytes(double parameters, int ranks, int stage, double optimizer_bytes) {
  require_ranks(ranks);
  constexpr double kParameterBytes = 2, kGradientBytes = 2;  // 16 bits each
  switch (stage) {
    case 0: return (kParameterBytes + kGradientBytes + optimizer_bytes) * parameters;
    case 1: return (kParameterBytes + kGradientBytes) * parameters + optimizer_bytes * parameters / ranks;
    case 2: return kParameterBytes * parameters + (kGradientBytes + optimizer_bytes) * parameters / ranks;
    case 3: return (kParameterBytes + kGradientBytes + optimizer_bytes) * parameters / ranks;
    default: throw ContractError(fmt::format("there is no stage {} of ZeRO", stage));
  }
}

double layer_activation_bytes(const LayerSize& layer, Recomputation recomputation) {
  require_ranks(layer.tensor);
  const double sbh = layer.sequence * layer.rows * layer.hidden;
  const double t = layer.tensor;
  const bool sliced = layer.sequence_parallel;
  if (recomputation == Recomputation::full) return 2 * sbh / (sliced ? t : 1);
  // Inputs of norms and of the sharded products, and dropout masks, lie whole on every tensor rank unless they are sliced.
  const double dense = sliced ? 34 / t : 10 + 24 / t;
  // Softmax output, its dropout mask and the mask's result: 2 + 1 + 2 bytes for each pair of tokens and head.
  const double pairs = 5 * layer.heads * layer.sequence / (layer.hidden * t);
  return sbh * (dense + (recomputation == Recomputation::none ? pairs : 0));
}

double gpt_step_flops(const GptSize& size, bool full_recomputation) {
  const double passes = full_recomputation ? 96 : 72;   // 24 for each of forward, (forward again,) backward twice
  const double of_head = full_recomputation ? 16 : 12;  // the head is not computed again
  const double tokens = size.rows * size.sequence;
  return passes * tokens * size.layers * size.hidden * size.hidden *
         (1 + size.sequence / (6 * size.hidden) + size.vocabulary / (of_head * size.layers * size.hidden));
}

double gpt_parameters_closed_form(const GptSize& size) {
  return 12 * size.layers * size.hidden * size.hidden *
         (1 + 13 / (12 * size.hidden) + (size.vocabulary + size.sequence) / (12 * size.layers * size.hidden));
}

double communication_share(double one_rank_compute_seconds, int ranks, double gradient_bytes, Link link) {
  const double communication = ring_all_reduce_seconds(ranks, gradient_bytes, link);
  return communication / (communication + one_rank_compute_seconds / ranks);
}

}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/scaling/workload.h"

namespace tandem {

/// What one layer takes on one rank. Bytes of activations are those of one token of the rank (of its slice of the sequence, where
/// context ranks share it), e being the bytes of an element, t the tensor degree, s = t under sequence parallelism and else 1, h
/// hidden, k the width of keys on the rank, f the MLP's width, a heads, T the tokens of a row:
///
///   norms        2 e h/s  what enters both,  2 e h/s  what leaves them
///   attention    e h/t  queries,  2 e k  keys and values,  e h/t  its output
///                materialized: (2 e + 1) a T/t  probabilities, their mask, what the mask leaves (without dropout: e a T/t)
///                fused: 4 a/t  log-sum-exp
///   MLP          2 e f/t  before and after GELU; gated 3 e f/t: gate, up and their product
///   quantized    outputs of norms and of the MLP's middle are kept as operands of products (1 byte in fp8); so is attention's,
///   besides dropout      2 h/s  masks, in models with biases (of the original GPT's kind); others are trained without
///
/// With e = 2, k = h/t, f = 4 h these are Korthikanti's s b h (10 + 24/t + 5 a s/(h t)), but for the log-sum-exp.
struct LayerMemory {
  double dense_elements = 0;   ///< parameters but experts
  double expert_elements = 0;  ///< of this rank's experts
  double element_bytes = 2;
  double key_value_width = 0;  ///< of keys on the rank
  bool dropout = false;
  double kept = 0;      ///< from the forward to the backward pass, of a layer, by the plan's recomputation
  double again = 0;     ///< computed again at once in the backward pass: of one layer, or of a group
  double backward = 0;  ///< gradients of activations while one layer is passed backward
};
[[nodiscard]] LayerMemory layer_memory(const Workload& workload);

/// Most (chunk, micro-batch) pairs whose activations pipeline rank `rank` of `ranks` holds: in closed form what playing the slots
/// of optimized/pipeline_parallel/schedule.h counts (zb-v: its limit of 2 p), and 2 p - 1 for zb-2p, ZB-H2 of Qi et al., which
/// the engine does not have.
[[nodiscard]] int peak_in_flight(const PipelineConfig& config, int ranks, int rank, int micro_batches);

}  // namespace tandem

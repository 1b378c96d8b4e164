// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/pipeline_layout.h"
#include "core/plan.h"

namespace tandem {

/// `backward` is both parts, layer by layer; `backward_input` makes what the previous stage waits for, `backward_weight` what
/// nobody waits for.
enum class SlotKind : std::uint8_t { forward, backward, backward_input, backward_weight };
[[nodiscard]] std::string_view name(SlotKind kind);

/// One chunk's work for one micro-batch.
struct PipelineSlot {
  SlotKind kind = SlotKind::forward;
  int chunk = 0;
  int micro_batch = 0;
  friend bool operator==(const PipelineSlot&, const PipelineSlot&) = default;
};

/// The order in which pipeline rank `rank` of `ranks` works: p ranks, m micro-batches, v chunks. In the pictures (p = 3, m = 4,
/// one unit of time a character, F = I = W = 1) a digit is the forward of that micro-batch, its small letter (a = 0) the
/// backward_input, its capital the backward_weight, `aA` a whole backward, `.` idle. Bubbles are shares of the makespan. In
/// flight counts the (chunk, micro-batch) pairs whose activations are held, at most. In every schedule each kind of slot of a
/// chunk runs in the order of micro-batches, so that gradients are summed in the same order.
///
/// gpipe (Huang et al., NeurIPS 2019): all forwards, then all backwards. Bubble (p - 1) / (m + p - 1). In flight m.
///     rank 0  0123......aAbBcCdD
///     rank 1  .0123...aAbBcCdD
///     rank 2  ..0123aAbBcCdD
///
/// 1f1b (Narayanan et al., SOSP 2019): min(m, p - rank - 1) forwards, then one forward and one backward in turn, then the
/// backwards left. Bubble as gpipe. In flight min(m, p - rank).
///     rank 0  012....aA3bB.cC.dD
///     rank 1  .01..aA2bB3cC.dD
///     rank 2  ..0aA1bB2cC3dD
///
/// interleaved (Narayanan et al., SC 2021): micro-batches in rounds of p, each round through chunk 0, then chunk 1, ...; first
/// min(v m, 2 (p - rank - 1) + (v - 1) p) forwards, then forward and backward in turn. A chunk is 1 / v of a rank's work, and so
/// is each wait: bubble (p - 1) / (v m + p - 1). In flight one more than the forwards that come first, and at most v m. m must be
/// a multiple of p. Here p = 2, v = 2, m = 2, chunk 1 underlined:
///     rank 0  0101..aA.bBaAbB
///               --  -- --
///     rank 1  .010aA1bBaAbB
///                ------
///
/// zb-h1 (Qi et al., ICLR 2024): 1f1b with the backward split. The weight parts of rank r lag r micro-batches behind, so that
/// input parts start sooner upstream, and fill the waits at the end. Bubble (p - 1) / (3 m + p - 1) where m >= p: a third of
/// 1f1b's idle time. In flight min(m, p) on every rank (the first rank of 1f1b has as many).
///     rank 0  012..aA3bBcCdD
///     rank 1  .01.a2bA3cBdCD
///     rank 2  ..0a1b2cA3dBCD
///
/// zb-v (Qi et al.): two chunks a rank, placed as a V, so that the rank that starts a micro-batch also ends it, with the backward
/// split. A list scheduler simulates all ranks with F = I = W = 1; a rank takes the first that is ready of forward of chunk 1,
/// backward_input (chunk 0 first), forward of chunk 0, backward_weight; at most 2 p pairs are in flight, at most 2 p - 1 of them
/// of chunk 0, so that chunk 1 can always go on. Where m >= 2 p the makespan is 6 m + p - 1 (two more for even p from 10 to 16):
/// all the work of a rank, and the time in which the first micro-batch reaches the last rank, which no schedule can save. Bubble
/// (p - 1) / (6 m + p - 1). In flight 2 p chunks of half a rank's layers: 1f1b's peak. Here p = 2, m = 4, chunk 1 underlined:
///     rank 0  0120aA1abA3bB2cBCcC3dD.dD
///                ---- -    ----  ---
///     rank 1  .0011aaA2bbB2A3ccC3BCddDD
///               - --   -  -- -  ----  -
///
/// Throws ContractError where the schedule is unknown, its chunks are not as above (gpipe, 1f1b, zb-h1: one), or m not a
/// multiple.
[[nodiscard]] std::vector<PipelineSlot> pipeline_order(const PipelineConfig& config, int ranks, int rank, int micro_batches);

/// Of every rank: [ranks].
[[nodiscard]] std::vector<std::vector<PipelineSlot>> pipeline_orders(const PipelineConfig& config, int ranks, int micro_batches);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

/// What the schedules of a pipeline cost, in closed form: p ranks, m micro-batches, v chunks a rank (1 but for interleaved),
/// every rank with equal work, messages free. A rank's work on one micro-batch takes T_F forward, T_I for the input part of
/// backward and T_W for its weight part, over all its chunks. Schedules: gpipe, 1f1b, interleaved, zb-h1.
namespace tandem::reference {

struct PipelineTimes {
  double forward = 1.0;          ///< T_F
  double input_backward = 1.0;   ///< T_I
  double weight_backward = 1.0;  ///< T_W
  [[nodiscard]] double work() const noexcept { return forward + input_backward + weight_backward; }
};

struct PipelineSize {
  int ranks = 1;          ///< p
  int chunks = 1;         ///< v
  int micro_batches = 1;  ///< m
};

/// Time that each rank idles between the first operation of the first rank and the last operation of the last one to finish.
///
///   gpipe, 1f1b   (p-1) (T_F + T_I + T_W). The first micro-batch reaches the last rank after (p-1) T_F, and the last one's
///   gradient
///                 needs (p-1) (T_I + T_W) from there to rank 0; the last rank itself never waits in between.
///   interleaved   (p-1) (T_F + T_I + T_W) / v. The same ramps, of chunks that take 1/v of the time. Needs m to be a multiple of
///   p. zb-h1         (p-1) (T_F + T_I - T_W). The gradient's way to rank 0 takes (p-1) T_I, weight parts being put off; rank r
///   puts
///                 off r of them, which the last rank does after its last input part: (p-1) T_W of the idle time is filled. Needs
///                 m >= p and T_W <= T_F, T_I, so that the weight parts fit into the gaps.
///
/// Throws ContractError where a condition does not hold or the schedule is none of these.
[[nodiscard]] double pipeline_idle_time(std::string_view schedule, PipelineSize size, PipelineTimes times);

/// pipeline_idle_time / (pipeline_idle_time + m work): for gpipe, 1f1b and interleaved this is (p-1) / (v m + p - 1), whatever
/// the times.
[[nodiscard]] double pipeline_bubble_share(std::string_view schedule, PipelineSize size, PipelineTimes times = {});

/// Most activations that `rank` keeps at a time, in micro-batches of one chunk (a v-th of the rank's layers each). One is kept
/// from its forward to the end of its backward pass, weight part included.
///
///   gpipe         m
///   1f1b          min(m, p - rank)
///   interleaved   min(v m, 2 (p - rank - 1) + (v - 1) p + 1): the warm-up forwards of Narayanan et al., "Efficient large-scale
///                 language model training on GPU clusters using Megatron-LM", SC 2021, section 2.2, and the one in work
///   zb-h1         min(m, p): those of 1f1b and `rank` more whose weight part is put off
[[nodiscard]] std::int64_t pipeline_peak_in_flight(std::string_view schedule, PipelineSize size, int rank);

}  // namespace tandem::reference

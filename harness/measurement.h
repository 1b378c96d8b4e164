// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/model_config.h"
#include "core/pitfall.h"
#include "core/step_program.h"
#include "harness/evidence.h"

namespace tandem {

/// Median, 10th and 90th percentile, 95 % bootstrap interval of the median, and the samples themselves.
struct Summary {
  double median = 0, p10 = 0, p90 = 0;
  double ci95_low = 0, ci95_high = 0;
  std::vector<double> samples;
};
/// Percentiles interpolate linearly; the bootstrap draws 2000 resamples from a fixed seed. Empty samples give NaN.
[[nodiscard]] Summary summarise(std::vector<double> samples);

/// Where the time of a rank's steps went. Computed from *unions* of intervals: nested, overlapping and zero-length spans count
/// once.
///   communication_busy = |transfer U wait|, exposed = |(transfer U wait) - (compute U optimizer)|,
///   compute = |compute U optimizer|, data, checkpoint: what of each is not hidden by compute or communication, idle = rest.
/// Identity: compute + exposed + data + checkpoint + idle = wall, exactly (integer nanoseconds).
struct TimeSplit {
  std::int64_t wall_ns = 0, compute_ns = 0, communication_busy_ns = 0, communication_exposed_ns = 0, data_ns = 0,
               checkpoint_ns = 0, idle_ns = 0;
};
/// Over the spans of Activity::step with step >= first_step. Fault points: spans_summed_not_united, waits_counted_as_compute.
[[nodiscard]] TimeSplit split_time(const std::vector<Span>& spans, int first_step, const PitfallSet& pitfalls);

/// FLOPs of the matrix products of one training step (forward 1x, backward 2x), a multiply-add counting 2, per token of a row of
/// `row_tokens` tokens, causal attention counted as causal:
///   forward per row = T [ layers (2 C 3C + 2 C C + 2 * 2 C F) + 2 C V ] + layers * 4 C * T (T + 1) / 2,   C hidden, F MLP width
/// With E experts a token passes k of them: k * 2 * 2 C F + 2 C E in place of 2 * 2 C F, as if none were dropped.
/// Convention name: "matmul, causal". Fault point: full_attention_flops.
[[nodiscard]] double model_flops_per_row(const GptConfig& model, std::int64_t row_tokens, const PitfallSet& pitfalls);
inline constexpr const char* kFlopsConvention = "matmul, causal";

/// flops / seconds / peak of all devices. Throws ContractError above 1.05 ("more than the machine can do"). Fault point:
/// peak_of_one_device (the caller passes devices and per-device peak).
[[nodiscard]] double utilization(double flops, double seconds, double device_peak_flops_per_second, int devices,
                                 const PitfallSet& pitfalls);

/// nccl-tests' bus bandwidth of an operation of `bytes` (the whole tensor; of an all-to-all what one rank sends): what each
/// rank's link carried, whatever the number of ranks is, bytes / seconds x
///   all_reduce 2 (n - 1) / n;   reduce_scatter, all_gather, all_to_all (n - 1) / n;   broadcast and messages 1
/// No link carries more than it can. Fault point: all_reduce_factor_for_every_collective.
[[nodiscard]] double bus_bandwidth(Collective collective, double bytes, double seconds, int ranks, const PitfallSet& pitfalls);

/// Everything that a result file says about a run, derived from what was recorded.
struct Measurements {
  Summary step_seconds;
  double tokens_per_second = 0, tokens_per_second_low = 0, tokens_per_second_high = 0;
  BytesByCategory peak_bytes{};
  BytesByCategory predicted_peak_bytes{};
  std::int64_t bytes_on_wire = 0;  ///< per step, all ranks
  std::int64_t predicted_bytes_on_wire = -1;
  std::vector<std::int64_t> bytes_by_purpose;  ///< [kPurposes], per step, all ranks
  double busy_share = 0, exposed_share = 0, compute_share = 0, data_share = 0, checkpoint_share = 0,
         idle_share = 0;  ///< of wall time, mean over ranks; NaN: no spans. compute + exposed + data + checkpoint + idle = 1
  double model_flops_utilization = 0;  ///< 0: peak unknown
  std::string bottleneck;              ///< "compute", "communication", "data", "checkpoint", "idle"
  double steps_over_wall = 0;          ///< sum of step times / end-to-end time: within 1 % of 1
};
/// Fault points: timer_stopped_before_completion and warm_up_included change which samples count.
[[nodiscard]] Measurements derive(const Measured& measured, const PitfallSet& pitfalls);

}  // namespace tandem

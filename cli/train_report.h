// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>

#include "core/config.h"
#include "optimized/training/trainer.h"

namespace tandem {

/// Time and memory of a training run, derived from what it recorded; the first step is the warm-up.
struct TrainSummary {
  double tokens_per_second = 0;  ///< trained tokens / wall time of the measured steps
  double step_seconds_median = 0, step_seconds_p10 = 0, step_seconds_p90 = 0;
  double busy_share = 0, exposed_share = 0;    ///< communication, mean over ranks
  std::array<double, kPurposes> bytes_sent{};  ///< a step, all ranks together, by purpose
  double model_flops_per_second = 0;
  double peak_flops_per_second = 0;   ///< of the GPUs' matrix products, all ranks together; 0: not measured
  BytesByCategory peak_bytes{};       ///< worst rank
  BytesByCategory predicted_bytes{};  ///< 0: no prediction
  BytesByCategory host_peak_bytes{}, host_predicted_bytes{};  ///< of state that the plan keeps in host memory
};
[[nodiscard]] TrainSummary summarise_training(const TrainReport& report, const RunConfig& config, std::int64_t sequence);

/// Summary and all samples as JSON text.
[[nodiscard]] std::string train_report_json(const TrainReport& report, const TrainSummary& summary, const RunConfig& config,
                                            const std::string& data);

/// Lines for people: rate, step time, communication, memory measured beside predicted, each category a row.
void print_train_summary(const TrainReport& report, const TrainSummary& summary);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/timeline.h"
#include "optimized/anomaly/finding.h"
#include "optimized/anomaly/link_probe.h"
#include "optimized/anomaly/monitors.h"
#include "optimized/comm/communicator.h"

namespace tandem {

/// What a rank says of its time in a sampled step.
struct RankTimes {
  double compute_seconds = 0;
  std::string slow_collective;  ///< one that has come to take longer, for a while; empty: none
  double slow_ratio = 0;
};
template <class Archive>
void serialize(Archive& archive, RankTimes& times) {
  archive(times.compute_seconds, times.slow_collective, times.slow_ratio);
}

/// Whether the run has become slow, and where. What it says is for people: nothing is rolled back for it. A machine that others
/// use too slows everything down now and then, so that only what is slow by a large factor in several samples in a row counts,
/// and a collective only where a probe of the links then finds one that is slower than the others and than it was.
class PerformanceMonitor {
 public:
  PerformanceMonitor();

  /// Of all ranks together, each step.
  [[nodiscard]] std::optional<AnomalyFinding> see_throughput(std::int64_t step, double seconds_per_token);
  /// This rank's, of the spans of one step. Waiting belongs to a collective: the others wait while one is late.
  [[nodiscard]] RankTimes see_spans(const std::vector<Span>& spans);
  /// Of all ranks, in their order. Collective where one of them names a collective.
  [[nodiscard]] std::vector<AnomalyFinding> compare(std::int64_t step, const std::vector<RankTimes>& by_rank,
                                                    Communicator& world);

 private:
  [[nodiscard]] std::optional<AnomalyFinding> slow_rank(std::int64_t step, const std::vector<RankTimes>& by_rank);

  DriftMonitor throughput_;
  std::map<std::string, DriftMonitor> collectives_;
  std::vector<DriftMonitor> compute_;  // by rank: share of the median rank's time
  std::vector<double> links_;          // seconds, the quickest of the first samples
  int baselines_ = 0;
};

}  // namespace tandem

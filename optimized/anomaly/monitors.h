// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/anomaly_config.h"
#include "core/pitfall.h"
#include "optimized/anomaly/finding.h"
#include "optimized/anomaly/robust_window.h"

namespace tandem {

/// Loss and gradient norm of each step against those of the steps before. Only what is higher than usual is a spike. Norms are
/// compared by their logarithm: where batches have few tokens, they differ by factors.
///
/// Values are compared once kLeastValues are there: of fewer, half can be close together by chance. The floors bound what can be
/// a spike at all: at the usual threshold of 12 a loss must be 1.24 times, a norm exp(12/4) = 20 times the median. Over 48,000
/// clean steps of small models (7 to 128 tokens a batch, equal and skewed rows, rates 1e-3 and 1e-2, with and without warm-up)
/// the loss had z of at most 5.5 without any floor, and the norm was at most 10.5 times the median; over 96,000 of other
/// seeds, 6.1 and 5.9.
class StepMonitor {
 public:
  static constexpr std::int64_t kLeastValues = 16;
  static constexpr double kLossFloor = 0.02;  ///< of the median
  static constexpr double kLogNormFloor = 0.25;

  StepMonitor(const AnomalyConfig& config, const PitfallSet& pitfalls = {});

  /// Of values that are finite.
  [[nodiscard]] std::vector<AnomalyFinding> judge(std::int64_t step, double loss, double norm) const;
  /// What became of the step. clean: nothing was wrong with it and its update was applied.
  void end_step(std::int64_t step, double loss, double norm, bool clean);
  /// Steps from `step` on have not been: windows hold the last ones before it.
  void forget_from(std::int64_t step);
  /// Steps before `step` are of no more use than the windows make of them.
  void forget_before(std::int64_t step);
  [[nodiscard]] bool has(std::int64_t step) const { return !history_.empty() && history_.back().step >= step; }
  /// 0 where nothing is known.
  [[nodiscard]] double median_norm() const { return norms_.median(); }
  [[nodiscard]] bool knows(std::int64_t step) const { return !history_.empty() && history_.front().step <= step; }
  /// Of the steps from `first` on, as far as they were seen: losses, norms.
  [[nodiscard]] std::pair<std::vector<double>, std::vector<double>> since(std::int64_t first) const;

 private:
  struct Entry {
    std::int64_t step;
    double loss, norm;
    bool usable;
  };
  void fill_windows();

  double threshold_;
  std::int64_t size_;
  bool takes_all_;
  RobustWindow losses_, norms_, log_norms_;
  std::deque<Entry> history_;
  std::int64_t unusual_ = 0;  // steps without a clean one in between
};

/// The loss scale of a run that scales dynamically: that it falls below 1, or is halved kHalvings times within the window. What
/// the scale falls by before it has fitted for the first time is no collapse: it began too high.
class ScaleMonitor {
 public:
  static constexpr int kHalvings = 10;
  explicit ScaleMonitor(std::int64_t window) : window_(window) {}
  /// The step ran with `scale`; `overflowed`: it was skipped for that. A finding once for each collapse.
  [[nodiscard]] std::optional<AnomalyFinding> see(std::int64_t step, double scale, bool overflowed);

 private:
  std::int64_t window_;
  bool has_fitted_ = false, has_collapsed_ = false;
  std::deque<std::int64_t> overflows_;  // steps
};

struct DriftRule {
  std::int64_t window = 32;
  std::int64_t least = 8;    ///< values before anything is judged
  double ratio = 4;          ///< to the median, from which on a value is unusual
  double threshold = 12;     ///< and its robust z-score
  double floor = 0;          ///< and how far above the median it is at least
  std::int64_t sustain = 5;  ///< so many unusual ones without a usual one between them are a drift
};

/// Something that takes longer than it did, and goes on doing so. A drift is told once; a usual value ends it.
class DriftMonitor {
 public:
  explicit DriftMonitor(const DriftRule& rule) : rule_(rule), window_(rule.window, 0.05) {}
  /// The ratio to the median where this value makes it a drift.
  [[nodiscard]] std::optional<double> see(double value);
  [[nodiscard]] double median() const { return window_.median(); }

 private:
  DriftRule rule_;
  RobustWindow window_;
  std::int64_t unusual_ = 0;
};

}  // namespace tandem

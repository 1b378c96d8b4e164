// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>

#include "optimized/anomaly/state_ranges.h"

namespace tandem {

/// The largest magnitude of each block's output in the steps that are looked at. It is a finding where it is not finite, or more
/// than kRatio times the largest of the last kSamples such steps and of 1, once there are kLeastSamples.
class ActivationRanges {
 public:
  static constexpr double kRatio = 16;
  static constexpr std::size_t kSamples = 8, kLeastSamples = 3;
  struct Excess {
    int layer = 0;
    double value = 0, limit = 0;
  };
  void begin_step() { now_.clear(); }
  /// Any number of times for a layer: micro-batches.
  void see(int layer, const TensorLook& output);
  /// Of the lowest layer: what comes after it has it from there.
  [[nodiscard]] std::optional<Excess> lowest_excess() const;
  /// The step was as it should be.
  void accept();

 private:
  std::map<int, double> now_;
  std::map<int, std::deque<double>> before_;
};

}  // namespace tandem

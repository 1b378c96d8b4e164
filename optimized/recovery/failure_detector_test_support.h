// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "optimized/recovery/failure_detector.h"

namespace tandem {

inline constexpr double kTickSeconds = 0.1;
inline constexpr int kTicksPerBeat = 10;

/// Ranks whose beats and whose detector go by a simulated clock: a beat a second, a check every tenth of it.
class Fleet {
 public:
  explicit Fleet(int ranks, DetectorOptions options = {})
      : beats(static_cast<std::size_t>(ranks)), detector_(set(options, ranks)) {
    for (int rank = 0; rank < ranks; ++rank) at(rank).rank = rank;
    is_silent.resize(beats.size());
    lost.resize(beats.size());
    detector_.begin_attempt(0, ranks, now_ns_);
  }

  [[nodiscard]] Heartbeat& at(int rank) { return beats[static_cast<std::size_t>(rank)]; }
  void enter(RunPhase phase) {
    for (Heartbeat& beat : beats) {
      beat.phase = phase;
      ++beat.progress;
    }
  }
  /// A step is done by every rank, so that the detector knows the pace.
  void step() {
    for (Heartbeat& beat : beats) {
      beat.phase = RunPhase::train;
      ++beat.progress;
      ++beat.step;
    }
  }
  /// Three quick steps of all ranks.
  void warm_up() {
    enter(RunPhase::train);
    run(1);
    for (int i = 0; i < 3; ++i) {
      step();
      run(1);
    }
  }
  void run(double seconds, const std::function<void()>& each_tick = {}) {
    for (int tick = 0; tick < static_cast<int>(seconds / kTickSeconds + 0.5); ++tick) {
      now_ns_ += 100'000'000;
      ++ticks_;
      if (each_tick) each_tick();
      for (std::size_t i = 0; i < beats.size(); ++i) {
        // Ranks beat one after the other, not at once.
        if ((ticks_ + static_cast<int>(i) * 3) % kTicksPerBeat != 0) continue;
        ++beats[i].sequence;
        if (is_silent[i] || lost[i]-- > 0) continue;
        lost[i] = 0;
        detector_.hear(beats[i], now_ns_);
      }
      for (const RankEvent& event : detector_.check(now_ns_)) events.push_back(event);
    }
  }
  /// Nothing is heard and nothing checked for so long.
  void pause(double seconds) { now_ns_ += static_cast<std::int64_t>(seconds * 1e9); }
  /// "1 hung, 0 alive"
  [[nodiscard]] std::string told() const {
    std::string text;
    for (const RankEvent& event : events) {
      text += (text.empty() ? "" : ", ") + std::to_string(event.rank) + " " + std::string(name(event.state));
    }
    return text;
  }
  [[nodiscard]] FailureDetector& detector() { return detector_; }
  [[nodiscard]] double now_seconds() const { return static_cast<double>(now_ns_) / 1e9; }
  [[nodiscard]] std::int64_t now_ns() const { return now_ns_; }

  std::vector<Heartbeat> beats;
  std::vector<bool> is_silent;
  std::vector<int> lost;
  std::vector<RankEvent> events;

 private:
  static DetectorOptions set(DetectorOptions options, int ranks) {
    options.ranks = ranks;
    return options;
  }
  FailureDetector detector_;
  std::int64_t now_ns_ = 1'000'000'000;
  int ticks_ = 0;
};

}  // namespace tandem

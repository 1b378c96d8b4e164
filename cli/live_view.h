// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "optimized/monitoring/hardware.h"
#include "optimized/monitoring/step_metrics.h"

namespace tandem {

struct LiveStyle {
  bool color = true;    ///< ANSI colours
  bool unicode = true;  ///< blocks for bar and sparkline, else ASCII
};

/// Steps that a view remembers: what its sparkline shows, and what the time left is reckoned from.
inline constexpr std::size_t kLiveHistory = 60;

/// The block of lines that shows a run: progress and time left, loss, norm and rates, memory, communication, incidents, hardware.
/// Each at most `columns` wide, without line breaks. history: steps in the order in which they were done, the newest last, not
/// empty; hardware: null leaves its line out. Time left: steps to do, times the mean time from one step of the history to the
/// next.
[[nodiscard]] std::vector<std::string> render_live(std::span<const StepMetrics> history, const HardwareSample* hardware,
                                                   int columns, const LiveStyle& style);

/// The last `columns` values, one character each, the smallest finite one lowest; what is not finite is '!'.
[[nodiscard]] std::string sparkline(std::span<const double> values, int columns, bool unicode);

/// A block at the bottom of a terminal that is drawn over as the run goes on, at most every `interval`. For one thread.
class LiveView {
 public:
  struct Size {
    int columns = 80, rows = 24;
  };
  struct Options {
    std::function<void(std::string_view)> write;  ///< to the terminal, at once
    std::function<Size()> size;
    LiveStyle style;
    std::chrono::milliseconds interval{200};
  };
  using Clock = std::chrono::steady_clock;

  explicit LiveView(Options options) : options_(std::move(options)) {}
  LiveView(const LiveView&) = delete;
  LiveView& operator=(const LiveView&) = delete;
  ~LiveView() { finish(); }

  /// Remembers the step, and draws unless it has just done so. hardware: as of render_live.
  void show(const StepMetrics& metrics, const HardwareSample* hardware = nullptr, Clock::time_point now = Clock::now());
  /// Takes the block away, so that other output can follow; the next show() draws it below that.
  void clear();
  /// Draws what has not been drawn yet and leaves it: what follows is written below.
  void finish();

 private:
  void draw(Clock::time_point now);
  [[nodiscard]] std::string to_its_top(int columns) const;

  Options options_;
  std::deque<StepMetrics> history_;
  std::optional<HardwareSample> hardware_;
  std::vector<int> drawn_widths_;  // of the lines on the screen
  std::optional<Clock::time_point> drawn_at_;
  bool pending_ = false;
};

/// For standard output; the style by NO_COLOR and the locale's variables. Empty where standard output is no terminal, or one that
/// cannot move its cursor (TERM=dumb): plain lines are for these.
[[nodiscard]] std::optional<LiveView::Options> live_view_of_terminal();

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "harness/text_table.h"

namespace tandem {

/// True where standard output is a terminal.
[[nodiscard]] bool output_is_terminal();
/// Aligned columns for a terminal, plain lines for a pipe.
[[nodiscard]] TableStyle output_style();

/// One line on standard error that is overwritten as work goes on; it appears after two seconds, and only on a terminal.
class ProgressLine {
 public:
  ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() { clear(); }

  /// done of total, and what is under way.
  void show(std::int64_t done, std::int64_t total, const std::string& what);
  /// Takes the line away, so that other output can follow.
  void clear();

 private:
  bool terminal_;
  bool visible_ = false;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "cli/terminal.h"

#include <unistd.h>

#include <cstdio>

#include <fmt/format.h>

namespace tandem {

bool output_is_terminal() { return isatty(STDOUT_FILENO) != 0; }

TableStyle output_style() { return output_is_terminal() ? TableStyle::terminal : TableStyle::plain; }

ProgressLine::ProgressLine() : terminal_(isatty(STDERR_FILENO) != 0), begin_(std::chrono::steady_clock::now()) {}

void ProgressLine::show(std::int64_t done, std::int64_t total, const std::string& what) {
  constexpr int kWidth = 24;
  if (!terminal_ || std::chrono::steady_clock::now() - begin_ < std::chrono::seconds(2)) return;
  const auto filled = total > 0 ? static_cast<std::size_t>(kWidth * done / total) : 0;
  fmt::print(stderr, "\r\033[K[{:<{}}] {}/{} {}", std::string(filled, '='), kWidth, done, total, what);
  std::fflush(stderr);
  visible_ = true;
}

void ProgressLine::clear() {
  if (visible_) fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
  visible_ = false;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "cli/live_view.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "cli/terminal.h"
#include "core/text.h"
#include "harness/text_table.h"

namespace tandem {
namespace {

constexpr std::array<const char*, 8> kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
constexpr std::array<const char*, 8> kLetters = {"_", ".", ",", "-", "=", "+", "*", "#"};

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U; }

// On a terminal: characters, none of which is taken for two columns.
int columns_of(std::string_view text) { return static_cast<int>(std::count_if(text.begin(), text.end(), begins_character)); }

// Nothing that a terminal would obey or stumble over: control characters are spaces, what is no UTF-8 is '?'.
std::string printable(std::string text, bool unicode) {
  while (const std::optional<std::size_t> at = first_invalid_utf8(text)) text[*at] = '?';
  std::string clean;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool second_control = byte == 0xC2 && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (byte < 0x20 || byte == 0x7F || second_control) {
      clean += ' ';
      i += second_control ? 1 : 0;
    } else if (byte < 0x80 || unicode) {
      clean += text[i];
    } else if (begins_character(text[i])) {
      clean += '?';
    }
  }
  return clean;
}

enum class Paint : std::uint8_t { plain, bright, dim, good, bad };

// One line, made of pieces; cut where the terminal ends.
class Line {
 public:
  Line(int columns, const LiveStyle& style) : left_(columns), style_(style) {}

  Line& add(std::string text, Paint paint = Paint::plain) {
    text = printable(std::move(text), style_.unicode);
    std::size_t end = 0;
    for (; end < text.size(); ++end) {
      if (!begins_character(text[end])) continue;
      if (left_ == 0) break;
      --left_;
    }
    text.resize(end);
    const char* begin = style_.color && !text.empty() ? code(paint) : "";
    text_ += begin + text + (*begin != '\0' ? "\033[0m" : "");
    return *this;
  }
  Line& field(std::string_view name, std::string value) { return add(fmt::format("{} ", name), Paint::dim).add(value + "  "); }
  [[nodiscard]] int left() const noexcept { return left_; }
  [[nodiscard]] std::string text() && { return std::move(text_); }

 private:
  static const char* code(Paint paint) {
    switch (paint) {
      case Paint::bright: return "\033[1m";
      case Paint::dim: return "\033[2m";
      case Paint::good: return "\033[32m";
      case Paint::bad: return "\033[1;31m";
      case Paint::plain: break;
    }
    return "";
  }

  int left_;
  LiveStyle style_;
  std::string text_;
};

std::string duration(double seconds) {
  if (!std::isfinite(seconds) || seconds > 1e9) return "-";
  const auto whole = static_cast<std::int64_t>(std::ceil(seconds));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {:02d} s", whole / 60, whole % 60);
  if (whole < 86400) return fmt::format("{} h {:02d} min", whole / 3600, whole / 60 % 60);
  return fmt::format("{} d {:02d} h", whole / 86400, whole / 3600 % 24);
}

// From one step to the next, so that evaluations and checkpoints count; a step that is done again after a rollback is one more.
double seconds_per_step(std::span<const StepMetrics> history) {
  const double elapsed = history.back().unix_seconds - history.front().unix_seconds;
  if (history.size() < 2 || !(elapsed > 0)) return history.back().step_seconds;
  return elapsed / static_cast<double>(history.size() - 1);
}

std::string progress_line(std::span<const StepMetrics> history, int columns, const LiveStyle& style) {
  const StepMetrics& now = history.back();
  const double share =
      now.total_steps > 0 ? std::clamp(static_cast<double>(now.step) / static_cast<double>(now.total_steps), 0.0, 1.0) : 0;
  std::string behind = fmt::format(" {:.1f} %", 100 * share);
  if (now.step < now.total_steps)
    behind += fmt::format("  {} left", duration(seconds_per_step(history) * static_cast<double>(now.total_steps - now.step)));
  if (now.attempt > 0) behind += fmt::format("  attempt {}", now.attempt + 1);
  Line line(columns, style);
  line.add(fmt::format("step {}/{} ", now.step, now.total_steps), Paint::bright);
  const int bar = std::clamp(line.left() - columns_of(behind) - 2, 0, 40);
  if (bar >= 5) {
    const auto filled = static_cast<int>(share * bar);
    std::string done, rest;
    for (int i = 0; i < bar; ++i)
      (i < filled ? done : rest) += style.unicode ? (i < filled ? "█" : "░") : (i < filled ? "#" : ".");
    line.add("[").add(done, Paint::good).add(rest, Paint::dim).add("]");
  }
  return std::move(line.add(behind)).text();
}

std::string loss_line(std::span<const StepMetrics> history, int columns, const LiveStyle& style) {
  const StepMetrics& now = history.back();
  Line line(columns, style);
  line.add("loss ", Paint::dim).add(fmt::format("{:.4f}  ", now.loss), std::isfinite(now.loss) ? Paint::bright : Paint::bad);
  if (now.validation_loss) line.field("validation", fmt::format("{:.4f}", *now.validation_loss));
  std::vector<double> losses;
  for (const StepMetrics& m : history) losses.push_back(m.loss);
  return std::move(line.add(sparkline(losses, std::min(line.left(), static_cast<int>(kLiveHistory)), style.unicode), Paint::good))
      .text();
}

std::string optimizer_line(const StepMetrics& now, int columns, const LiveStyle& style) {
  Line line(columns, style);
  // The sign of a NaN says nothing.
  line.field("norm", fmt::format("{:.3f}", std::abs(now.gradient_norm)));
  line.field("lr", fmt::format("{:.2e}", now.learning_rate));
  if (now.loss_scale != 1) line.field("loss scale", fmt::format("{:.12g}", now.loss_scale));
  if (now.skipped_steps > 0) line.field("skipped", fmt::format("{}", now.skipped_steps));
  return std::move(line).text();
}

std::string incident_line(const StepMetrics& now, int columns, const LiveStyle& style) {
  Line line(columns, style);
  if (now.incidents == 0) return std::move(line.field("incidents", "none")).text();
  line.add("incidents ", Paint::dim).add(fmt::format("{}", now.incidents), Paint::bad);
  if (!now.last_incident.empty()) line.add(", last: " + now.last_incident);
  return std::move(line).text();
}

int columns_without_codes(std::string_view line) {
  int columns = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\033') {
      i = line.find('m', i);
    } else {
      columns += begins_character(line[i]) ? 1 : 0;
    }
  }
  return columns;
}

}  // namespace

std::string sparkline(std::span<const double> values, int columns, bool unicode) {
  values = values.last(std::min(values.size(), static_cast<std::size_t>(std::max(columns, 0))));
  double low = INFINITY, high = -INFINITY;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  const auto& levels = unicode ? kBlocks : kLetters;
  std::string line;
  for (const double value : values) {
    // Halves, so that the range of finite values does not overflow.
    const double range = high / 2 - low / 2;
    const double height = range > 0 ? (value / 2 - low / 2) / range : 0.5;
    line += std::isfinite(value) ? levels[static_cast<std::size_t>(std::lround(height * (levels.size() - 1)))] : "!";
  }
  return line;
}

std::vector<std::string> render_live(std::span<const StepMetrics> history, const HardwareSample* hardware, int columns,
                                     const LiveStyle& style) {
  const StepMetrics& now = history.back();
  const auto line = [&] { return Line(columns, style); };
  std::vector<std::string> lines = {
      progress_line(history, columns, style),
      loss_line(history, columns, style),
      optimizer_line(now, columns, style),
      std::move(line()
                    .field("rate", human_count(now.tokens_per_second) + " tokens/s")
                    .field("step", human_seconds(now.step_seconds))
                    .field("waiting for data", human_share(now.data_wait_share)))
          .text(),
      std::move(line()
                    .field("communication", human_share(now.communication_share) + " of the step")
                    .field("not hidden", human_share(now.exposed_share)))
          .text(),
      std::move(line().field("memory", human_bytes(now.memory_bytes)).field("peak", human_bytes(now.peak_memory_bytes))).text(),
      incident_line(now, columns, style)};
  if (hardware != nullptr) lines.push_back(std::move(line().field("machine", describe(*hardware))).text());
  return lines;
}

void LiveView::show(const StepMetrics& metrics, const HardwareSample* hardware, Clock::time_point now) {
  // The last one that was taken stays on the screen.
  const std::optional<double> validated = history_.empty() ? std::nullopt : history_.back().validation_loss;
  history_.push_back(metrics);
  if (!metrics.validation_loss) history_.back().validation_loss = validated;
  if (history_.size() > kLiveHistory) history_.pop_front();
  if (hardware != nullptr) hardware_ = *hardware;
  pending_ = true;
  if (!drawn_at_ || now - *drawn_at_ >= options_.interval) draw(now);
}

// A terminal that has become narrower since has broken the lines that it shows into more rows.
std::string LiveView::to_its_top(int columns) const {
  int rows = 0;
  for (const int width : drawn_widths_) rows += std::max(1, (width + columns - 1) / columns);
  return rows == 0 ? "\r" : fmt::format("\r\033[{}A", rows);
}

void LiveView::draw(Clock::time_point now) {
  const Size size = options_.size();
  const int columns = std::max(size.columns, 20);
  const std::vector<StepMetrics> history(history_.begin(), history_.end());
  // The last column stays free: some terminals begin a new row as soon as it is written to.
  std::vector<std::string> lines = render_live(history, hardware_ ? &*hardware_ : nullptr, columns - 1, options_.style);
  // What is higher than the screen cannot be drawn over.
  lines.resize(std::min(lines.size(), static_cast<std::size_t>(std::max(size.rows - 1, 1))));
  std::string out = to_its_top(columns);
  drawn_widths_.clear();
  for (const std::string& line : lines) {
    out += line + "\033[K\n";
    drawn_widths_.push_back(columns_without_codes(line));
  }
  options_.write(out + "\033[J");
  drawn_at_ = now;
  pending_ = false;
}

void LiveView::clear() {
  if (!drawn_widths_.empty()) options_.write(to_its_top(std::max(options_.size().columns, 20)) + "\033[J");
  drawn_widths_.clear();
  drawn_at_.reset();
  pending_ = !history_.empty();
}

void LiveView::finish() {
  if (pending_) draw(Clock::now());
  drawn_widths_.clear();
  drawn_at_.reset();
}

std::optional<LiveView::Options> live_view_of_terminal() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  if (!output_is_terminal() || variable("TERM") == "dumb" || variable("TERM").empty()) return std::nullopt;
  LiveView::Options options;
  options.style.color = variable("NO_COLOR").empty();
  std::string locale;
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"})
    if (locale.empty()) locale = variable(name);
  options.style.unicode = locale.find("UTF-8") != std::string::npos || locale.find("utf8") != std::string::npos;
  options.write = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  options.size = [] {
    winsize size{};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return LiveView::Size{};
    return LiveView::Size{.columns = size.ws_col, .rows = size.ws_row};
  };
  return options;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "cli/live_view.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include <fmt/format.h>

namespace tandem {
namespace {

constexpr LiveStyle kAscii = {.color = false, .unicode = false};

StepMetrics at_step(std::int64_t step) {
  StepMetrics m;
  m.step = step;
  m.total_steps = 200;
  m.unix_seconds = 1000 + 2.0 * static_cast<double>(step);
  m.loss = 10 - 0.05 * static_cast<double>(step);
  m.gradient_norm = 0.75;
  m.learning_rate = 3e-4;
  m.tokens_per_second = 12300;
  m.step_seconds = 1.5;
  m.communication_share = 0.25;
  m.exposed_share = 0.05;
  m.data_wait_share = 0.01;
  m.memory_bytes = std::int64_t{1} << 30;
  m.peak_memory_bytes = std::int64_t{3} << 29;
  return m;
}

std::vector<StepMetrics> steps_to(std::int64_t last) {
  std::vector<StepMetrics> history;
  for (std::int64_t step = last - 9; step <= last; ++step) history.push_back(at_step(step));
  return history;
}

std::string joined(const std::vector<std::string>& lines) { return fmt::format("{}\n", fmt::join(lines, "\n")); }

TEST(RenderLive, ShowsARunInEightLines) {
  std::vector<StepMetrics> history = steps_to(50);
  StepMetrics& now = history.back();
  now.validation_loss = 7.25;
  now.loss_scale = 65536;
  now.skipped_steps = 2;
  now.incidents = 1;
  now.last_incident = "NaN in the gradient of rank 1";
  now.attempt = 1;
  HardwareSample hardware;
  hardware.load_1_minute = 2.1;

  // 150 steps of 2 s each are to be done, whatever a step itself takes.
  EXPECT_EQ(joined(render_live(history, &hardware, 79, kAscii)),
            "step 50/200 [#######.......................] 25.0 %  5 min 00 s left  attempt 2\n"
            "loss 7.5000  validation 7.2500  #*++=-,,._\n"
            "norm 0.750  lr 3.00e-04  loss scale 65536  skipped 2  \n"
            "rate 12.3k tokens/s  step 1.50 s  waiting for data 1.0 %  \n"
            "communication 25.0 % of the step  not hidden 5.0 %  \n"
            "memory 1.00 GiB  peak 1.50 GiB  \n"
            "incidents 1, last: NaN in the gradient of rank 1\n"
            "machine load 2.1  \n");
}

TEST(RenderLive, FirstAndLastStepHaveNoDivisionByNothing) {
  const std::vector<StepMetrics> first = {at_step(1)};
  const std::vector<StepMetrics> last = {at_step(199), at_step(200)};

  EXPECT_NE(render_live(first, nullptr, 79, kAscii)[0].find(" 0.5 %  4 min 59 s left"), std::string::npos);
  EXPECT_EQ(render_live(first, nullptr, 79, kAscii).size(), 7U);
  EXPECT_EQ(render_live(last, nullptr, 79, kAscii)[0].find("left"), std::string::npos);
  EXPECT_NE(render_live(last, nullptr, 79, kAscii)[0].find("] 100.0 %"), std::string::npos);
  EXPECT_EQ(render_live(std::vector<StepMetrics>{StepMetrics()}, nullptr, 79, kAscii)[0],
            "step 0/0 [........................................] 0.0 %");
}

TEST(RenderLive, NoLineIsWiderThanTheTerminal) {
  std::vector<StepMetrics> history = steps_to(50);
  history.back().incidents = 1;
  history.back().last_incident = std::string(300, 'x');
  HardwareSample hardware;
  hardware.temperatures.push_back({std::string(100, 'z'), 50});

  for (int columns = 1; columns < 120; ++columns) {
    for (const std::string& line : render_live(history, &hardware, columns, {.color = false, .unicode = true})) {
      const auto characters = std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; });
      EXPECT_LE(characters, columns) << line;
    }
  }
}

TEST(RenderLive, TextOfAnIncidentCannotCommandTheTerminal) {
  std::vector<StepMetrics> history = steps_to(50);
  history.back().incidents = 1;
  history.back().last_incident =
      "a\033[2Jb\nc\xC2\x9B"
      "d\xFF\xC3\xA9";

  EXPECT_EQ(render_live(history, nullptr, 79, {.color = false, .unicode = true})[6], "incidents 1, last: a [2Jb c d?\xC3\xA9");
  EXPECT_EQ(render_live(history, nullptr, 79, kAscii)[6], "incidents 1, last: a [2Jb c d??");
}

TEST(RenderLive, ColoursOnlyWhereTheyAreWanted) {
  const std::vector<StepMetrics> history = steps_to(50);

  EXPECT_EQ(joined(render_live(history, nullptr, 79, {.color = false, .unicode = true})).find('\033'), std::string::npos);
  const std::string colored = joined(render_live(history, nullptr, 79, {.color = true, .unicode = true}));
  EXPECT_NE(colored.find("\033[2mnorm \033[0m0.750"), std::string::npos);
  EXPECT_NE(colored.find("█"), std::string::npos);
}

TEST(Sparkline, GoesFromTheLowestToTheHighest) {
  const std::vector<double> rising = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(sparkline(rising, 60, true), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(sparkline(rising, 2, false), "_#");
  EXPECT_EQ(sparkline(rising, 0, false), "");
  EXPECT_EQ(sparkline({}, 10, false), "");
}

TEST(Sparkline, TakesFlatInfiniteAndHugeValues) {
  constexpr double kHuge = std::numeric_limits<double>::max();
  EXPECT_EQ(sparkline(std::vector<double>{3, 3}, 9, false), "==");
  EXPECT_EQ(sparkline(std::vector<double>{1, NAN, INFINITY, 2}, 9, false), "_!!#");
  EXPECT_EQ(sparkline(std::vector<double>{NAN}, 9, false), "!");
  EXPECT_EQ(sparkline(std::vector<double>{-kHuge, kHuge}, 9, false), "_#");
}

// A terminal that keeps what is written to it.
struct Screen {
  LiveView::Size size;
  std::vector<std::string> writes;

  LiveView::Options options() {
    LiveView::Options result;
    result.write = [this](std::string_view text) { writes.emplace_back(text); };
    result.size = [this] { return size; };
    result.style = kAscii;
    return result;
  }
};

constexpr LiveView::Clock::time_point kStart{};

TEST(LiveView, DrawsOverItselfAtMostFiveTimesASecond) {
  Screen screen;
  LiveView view(screen.options());
  for (int i = 0; i <= 10; ++i) view.show(at_step(i + 1), nullptr, kStart + std::chrono::milliseconds(50 * i));

  ASSERT_EQ(screen.writes.size(), 3U);  // at 0, 200 and 400 ms
  EXPECT_TRUE(screen.writes[0].starts_with("\rstep 1/200"));
  EXPECT_TRUE(screen.writes[1].starts_with("\r\033[7Astep 5/200")) << screen.writes[1];
  EXPECT_EQ(std::count(screen.writes[1].begin(), screen.writes[1].end(), '\n'), 7);
  EXPECT_TRUE(screen.writes[2].ends_with("\033[K\n\033[J"));
}

TEST(LiveView, LeavesTheLastStepOnTheScreen) {
  Screen screen;
  {
    LiveView view(screen.options());
    view.show(at_step(1), nullptr, kStart);
    view.show(at_step(2), nullptr, kStart);
  }
  ASSERT_EQ(screen.writes.size(), 2U);
  EXPECT_TRUE(screen.writes[1].starts_with("\r\033[7Astep 2/200"));
}

TEST(LiveView, MakesWayForOtherOutput) {
  Screen screen;
  LiveView view(screen.options());
  view.clear();
  EXPECT_TRUE(screen.writes.empty());
  view.show(at_step(1), nullptr, kStart);
  view.clear();
  view.show(at_step(2), nullptr, kStart);

  ASSERT_EQ(screen.writes.size(), 3U);
  EXPECT_EQ(screen.writes[1], "\r\033[7A\033[J");
  EXPECT_TRUE(screen.writes[2].starts_with("\rstep 2/200"));
}

TEST(LiveView, KeepsTheLastValidationLoss) {
  Screen screen;
  LiveView view(screen.options());
  StepMetrics validated = at_step(1);
  validated.validation_loss = 9.125;
  view.show(validated, nullptr, kStart);
  for (int i = 2; i < 100; ++i) view.show(at_step(i), nullptr, kStart + std::chrono::seconds(i));

  EXPECT_NE(screen.writes.back().find("validation 9.1250"), std::string::npos);
}

TEST(LiveView, FollowsATerminalThatBecomesSmaller) {
  Screen screen;
  LiveView view(screen.options());
  view.show(at_step(1), nullptr, kStart);
  screen.size = {.columns = 40, .rows = 5};
  view.show(at_step(2), nullptr, kStart + std::chrono::seconds(1));
  screen.writes.clear();
  view.show(at_step(3), nullptr, kStart + std::chrono::seconds(2));

  // Four lines fit: the fifth row is the cursor's.
  EXPECT_TRUE(screen.writes[0].starts_with("\r\033[4Astep 3/200")) << screen.writes[0];
}

TEST(LiveView, CountsTheRowsOfLinesThatANarrowTerminalHasBroken) {
  Screen screen;
  LiveView view(screen.options());
  view.show(at_step(1), nullptr, kStart);
  screen.size.columns = 30;
  view.clear();

  // 76 + 13 + 25 + 57 + 51 + 32 + 15 characters in rows of 30.
  EXPECT_EQ(screen.writes.back(), "\r\033[12A\033[J");
}

}  // namespace
}  // namespace tandem

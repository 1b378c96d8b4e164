// SPDX-License-Identifier: Apache-2.0
#include "cli/supervise_workers.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "core/io/test_folder.h"
#include "optimized/monitoring/metrics_jsonl.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::string lines_to(std::int64_t last) {
  std::string text;
  StepMetrics metrics;
  for (metrics.step = 1; metrics.step <= last; ++metrics.step) text += metrics_line(metrics) + "\n";
  return text;
}

/// A run whose workers are a program that does nothing.
class RunSteps : public testing::Test {
 protected:
  static TrainArguments arguments(const fs::path& folder) {
    TrainArguments arguments;
    arguments.output = folder.string();
    arguments.supervise.launcher = "true";
    return arguments;
  }
  void start() { launcher_.start({.number = 0, .resume = false, .plan = {}})->kill(); }

  const TestFolder folder_;
  const fs::path file_ = folder_ / "metrics.jsonl";
  const TrainArguments arguments_ = arguments(folder_.path());
  const TrainPlan plan_;
  RunLauncher launcher_{arguments_, plan_, "127.0.0.1:1", false};
};

TEST_F(RunSteps, AreThoseOfThePresentAttempt) {
  start();
  EXPECT_EQ(launcher_.steps_done(), std::nullopt);
  folder_.write("metrics.jsonl", lines_to(3));
  EXPECT_EQ(launcher_.steps_done(), 3);
  start();
  EXPECT_EQ(launcher_.steps_done(), std::nullopt);
  folder_.write("metrics.jsonl", lines_to(5));
  EXPECT_EQ(launcher_.steps_done(), 5);
}

TEST_F(RunSteps, AreNotKnownWhereTheFileCouldNotBeReadWhenTheAttemptBegan) {
  fs::create_directory(file_);
  EXPECT_EQ(count_steps_in(file_.string()), std::nullopt);
  start();
  fs::remove(file_);
  EXPECT_EQ(count_steps_in(file_.string()), 0U);
  folder_.write("metrics.jsonl", lines_to(3));

  EXPECT_EQ(launcher_.steps_done(), std::nullopt) << "they may be of an earlier attempt";

  EXPECT_EQ(count_steps_in(file_.string()), 3U);
  EXPECT_TRUE(steps_behind(file_.string(), std::nullopt).empty());
}

}  // namespace
}  // namespace tandem

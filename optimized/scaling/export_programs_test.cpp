// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/export_programs.h"

#include <map>
#include <sstream>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"
#include "core/process_grid.h"

namespace tandem {
namespace {

ClusterSpec cluster() {
  ClusterSpec spec;
  spec.name = "test";
  spec.device = {"device", {{"fp32", 1e12}}, 8e9, 1e11, {}};
  spec.devices_per_node = 2;
  spec.levels = {{.name = "near", .devices = 2, .bytes_per_second = 4e9, .latency_seconds = 1e-6, .efficiency = 0.5},
                 {.name = "far", .bytes_per_second = 3e9, .latency_seconds = 2e-6, .oversubscription = 2}};
  return spec;
}

TrainingPlan plan() {
  TrainingPlan plan;
  plan.parallel = {.data = 2, .tensor = 2, .pipeline = 2};
  plan.batch = {8, 4};
  plan.overlap.gradients = true;
  return plan;
}

// First words of lines, and those that begin with `word`.
struct Lines {
  std::map<std::string, int> count;
  std::map<std::string, std::vector<std::string>> all;

  explicit Lines(const std::string& text) {
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) {
      const std::string word = line.substr(0, line.find(' '));
      ++count[word];
      all[word].push_back(line);
    }
  }
};

TEST(ExportPrograms, HasTheProgramOfEachStageAndTheGroupsOfAllRanks) {
  const Lines lines(programs_as_text(plan(), {}, GptConfig{}.sequence, cluster()));

  EXPECT_EQ(lines.all.at("ranks"), std::vector<std::string>{"ranks 8"});
  EXPECT_EQ(lines.all.at("level"), (std::vector<std::string>{"level 2 2000000000 1e-06 near", "level 0 1500000000 2e-06 far"}));
  EXPECT_EQ(lines.all.at("program"), (std::vector<std::string>{"program 0", "program 1"}));
  EXPECT_EQ(lines.count.at("end"), 2);
  EXPECT_EQ(lines.all.at("group").front(), "group world 0 1 4 5 2 3 6 7");
  EXPECT_EQ(lines.count.at("send"), 8) << "four micro-batches, forward and backward";
  EXPECT_EQ(lines.count.at("recv"), 8);
  EXPECT_GT(lines.count.at("background"), 0);
  EXPECT_EQ(lines.count.at("wait"), lines.count.at("background")) << "each is waited for once";
}

TEST(ExportPrograms, ComputesAsLongAsTheReplaySays) {
  const TrainingPlan of = plan();
  const OperationCost cost = cost_on(cluster(), of, {}, GptConfig{}.sequence);
  const ReplayTiming timing = replay(of, {}, GptConfig{}.sequence, cost, shares_links_on(cluster(), of));
  double expected = 0, computed = 0;
  for (const double seconds : timing.busy_seconds) expected += seconds;

  const Lines lines(programs_as_text(of, {}, GptConfig{}.sequence, cluster()));

  for (const std::string& line : lines.all.at("compute")) computed += std::stod(line.substr(line.find(' ')));
  EXPECT_NEAR(computed, expected, 1e-12 * expected);
  EXPECT_DOUBLE_EQ(std::stod(lines.all.at("predicted_seconds").front().substr(18)), timing.step_seconds);
}

TEST(ExportPrograms, AFolderThatIsNotThereIsRefused) {
  EXPECT_THROW(export_programs(plan(), {}, GptConfig{}.sequence, cluster(), "no-such-folder/step.txt"), IoError);
}

}  // namespace
}  // namespace tandem

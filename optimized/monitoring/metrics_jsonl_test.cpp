// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/metrics_jsonl.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "core/error.h"
#include "core/io/test_folder.h"
#include "optimized/monitoring/sinks.h"

namespace tandem {
namespace {

// Every field has a value of its own, and the fractions are not exact in decimal.
StepMetrics some_metrics(std::int64_t step) {
  StepMetrics m;
  m.step = step;
  m.total_steps = 100;
  m.unix_seconds = 1790000000.125 + static_cast<double>(step);
  m.attempt = 3;
  m.loss = 2.0 / 3;
  m.gradient_norm = 0.1;
  m.learning_rate = 3e-4;
  m.loss_scale = 65536;
  m.tokens = 1024;
  m.step_seconds = 0.2;
  m.tokens_per_second = 5120;
  m.communication_share = 0.3;
  m.exposed_share = 0.07;
  m.data_wait_share = 0.01;
  m.memory_bytes = 5000000000;
  m.peak_memory_bytes = 6000000000;
  m.skipped_steps = 2;
  m.incidents = 4;
  m.last_incident = "NaN in \"wte\" of rank 1";
  return m;
}

void append_raw(const std::filesystem::path& file, std::string_view text) {
  std::ofstream(file, std::ios::binary | std::ios::app) << text;
}

TEST(MetricsJsonl, GivesEveryFieldBackWithItsBits) {
  const TestFolder folder;
  StepMetrics second = some_metrics(8);
  second.validation_loss = 0.1 + 0.2;
  {
    MetricsJsonl metrics(folder / "deep/metrics.jsonl");
    metrics.record(some_metrics(7));
    metrics.incident(1790000001.5, "rolled back to step 4");
    metrics.record(second);
  }

  const MetricsHistory read = read_metrics(folder / "deep/metrics.jsonl");

  ASSERT_EQ(read.steps.size(), 2U);
  const StepMetrics& m = read.steps[0];
  const StepMetrics wanted = some_metrics(7);
  EXPECT_EQ(m.step, wanted.step);
  EXPECT_EQ(m.total_steps, wanted.total_steps);
  EXPECT_EQ(m.unix_seconds, wanted.unix_seconds);
  EXPECT_EQ(m.attempt, wanted.attempt);
  EXPECT_EQ(m.loss, wanted.loss);
  EXPECT_EQ(m.gradient_norm, wanted.gradient_norm);
  EXPECT_EQ(m.learning_rate, wanted.learning_rate);
  EXPECT_EQ(m.loss_scale, wanted.loss_scale);
  EXPECT_EQ(m.tokens, wanted.tokens);
  EXPECT_EQ(m.step_seconds, wanted.step_seconds);
  EXPECT_EQ(m.tokens_per_second, wanted.tokens_per_second);
  EXPECT_EQ(m.communication_share, wanted.communication_share);
  EXPECT_EQ(m.exposed_share, wanted.exposed_share);
  EXPECT_EQ(m.data_wait_share, wanted.data_wait_share);
  EXPECT_EQ(m.memory_bytes, wanted.memory_bytes);
  EXPECT_EQ(m.peak_memory_bytes, wanted.peak_memory_bytes);
  EXPECT_EQ(m.skipped_steps, wanted.skipped_steps);
  EXPECT_EQ(m.incidents, wanted.incidents);
  EXPECT_EQ(m.last_incident, wanted.last_incident);
  EXPECT_FALSE(m.validation_loss);
  EXPECT_EQ(read.steps[1].validation_loss, second.validation_loss);
  ASSERT_EQ(read.incidents.size(), 1U);
  EXPECT_EQ(read.incidents[0].first, 1790000001.5);
  EXPECT_EQ(read.incidents[0].second, "rolled back to step 4");
}

TEST(MetricsJsonl, LineIsJsonWhateverTheNumbersAndTheText) {
  StepMetrics m = some_metrics(1);
  m.loss = std::numeric_limits<double>::quiet_NaN();
  m.gradient_norm = std::numeric_limits<double>::infinity();
  m.last_incident = "line\nbreak, \xFF";
  const TestFolder folder;
  const std::filesystem::path file = folder.write("m.jsonl", metrics_line(m) + "\n");

  const MetricsHistory read = read_metrics(file);

  ASSERT_EQ(read.steps.size(), 1U);
  EXPECT_TRUE(std::isnan(read.steps[0].loss));
  EXPECT_TRUE(std::isnan(read.steps[0].gradient_norm));
  EXPECT_EQ(read.steps[0].last_incident, "line\nbreak, \xEF\xBF\xBD");
}

TEST(MetricsJsonl, LastLineThatIsCutIsLeftOutAndThenReplaced) {
  const TestFolder folder;
  const std::filesystem::path file = folder / "m.jsonl";
  MetricsJsonl(file).record(some_metrics(1));
  // Longer than what is read at a time when the end is looked for.
  append_raw(file, metrics_line(some_metrics(2)).substr(0, 100) + std::string(9000, ' '));
  EXPECT_EQ(read_metrics(file).steps.size(), 1U);

  MetricsJsonl(file).record(some_metrics(3));

  const MetricsHistory read = read_metrics(file);
  ASSERT_EQ(read.steps.size(), 2U);
  EXPECT_EQ(read.steps[0].step, 1);
  EXPECT_EQ(read.steps[1].step, 3);
}

TEST(MetricsJsonl, NamesFileAndLineOfAnythingElse) {
  const TestFolder folder;
  const std::string good = metrics_line(some_metrics(1)) + "\n";
  const auto complaint = [&](const std::string& line) {
    const std::filesystem::path file = folder.write("m.jsonl", good + line + "\n" + good);
    return message_of<InputError>([&] { (void)read_metrics(file); });
  };

  for (const char* line :
       {"", "{\"kind\": \"st", "[]", "{}", "{\"kind\": \"step\"}", "{\"kind\": 3}", "{\"kind\": \"incident\"}"})
    EXPECT_NE(complaint(line).find("m.jsonl, line 2: "), std::string::npos) << line;
  EXPECT_EQ(complaint("{\"kind\": \"of a later version\"}"), "");
  EXPECT_THROW((void)read_metrics(folder / "none"), IoError);
  EXPECT_THROW((void)read_metrics(folder.path()), IoError) << "it can be opened, and not be read";
}

TEST(MetricsJsonl, FullDiskLeavesWholeLines) {
  const TestFolder folder;
  const std::filesystem::path file = folder / "m.jsonl";
  MetricsJsonl metrics(file);
  metrics.record(some_metrics(1));
  const auto bytes = std::filesystem::file_size(file);
  {
    const FileSizeLimit limit(bytes + 40);
    EXPECT_THROW(metrics.record(some_metrics(2)), IoError);
  }

  EXPECT_EQ(std::filesystem::file_size(file), bytes);
  metrics.record(some_metrics(3));
  ASSERT_EQ(read_metrics(file).steps.size(), 2U);
  EXPECT_EQ(read_metrics(file).steps[1].step, 3);
}

TEST(MetricsSinks, HandEachStepToAllThatAreOpen) {
  const TestFolder folder;
  std::filesystem::create_directories(folder / "root/proc");
  folder.write("root/proc/loadavg", "7.25 1 1 1/1 1\n");
  {
    MetricsSinks sinks({.jsonl = folder / "m.jsonl", .tensorboard = folder / "events", .hardware_root = folder / "root"});
    sinks.record(some_metrics(1));
    sinks.incident("gradient of rank 1 is NaN");
    sinks.record(some_metrics(2));
    ASSERT_NE(sinks.hardware(), nullptr);
    EXPECT_EQ(sinks.hardware()->load_1_minute, 7.25);
    EXPECT_EQ(sinks.prometheus_url(), "");
  }

  const MetricsHistory read = read_metrics(folder / "m.jsonl");
  EXPECT_EQ(read.steps.size(), 2U);
  ASSERT_EQ(read.incidents.size(), 1U);
  EXPECT_EQ(read.incidents[0].second, "gradient of rank 1 is NaN");
  // The one sample that there was went with one step.
  const std::string text = TestFolder::read(folder / "m.jsonl");
  EXPECT_NE(text.find("\"load_1_minute\":7.25"), std::string::npos);
  EXPECT_EQ(text.find("\"hardware\""), text.rfind("\"hardware\""));
  const std::filesystem::directory_iterator events(folder / "events");
  EXPECT_NE(TestFolder::read(events->path()).find("train/gradient_norm"), std::string::npos);
}

TEST(MetricsSinks, GiveUpWhatCannotBeWrittenAndSaySoOnce) {
  const TestFolder folder;
  std::vector<std::string> problems;
  MetricsSinks sinks({.jsonl = folder / "m.jsonl", .hardware_root = folder.path(), .on_problem = [&](const std::string& problem) {
                        problems.push_back(problem);
                      }});
  sinks.record(some_metrics(1));
  {
    const FileSizeLimit limit(std::filesystem::file_size(folder / "m.jsonl"));
    sinks.record(some_metrics(2));
  }
  sinks.record(some_metrics(3));
  sinks.incident("none of this is kept");

  ASSERT_EQ(problems.size(), 1U);
  EXPECT_NE(problems[0].find("m.jsonl: cannot write to it: "), std::string::npos) << problems[0];
  EXPECT_EQ(read_metrics(folder / "m.jsonl").steps.size(), 1U);
}

TEST(MetricsSinks, DoNothingWhereNoneIsOpen) {
  MetricsSinks sinks({});
  sinks.record(some_metrics(1));
  sinks.incident("nobody hears it");

  EXPECT_EQ(sinks.hardware(), nullptr);
}

TEST(MetricsSinks, RefuseAPlaceThatCannotBeWrittenBeforeTheRun) {
  const TestFolder folder;
  folder.write("file", "");

  EXPECT_THROW(MetricsSinks({.jsonl = folder.path()}), IoError);
  EXPECT_THROW(MetricsSinks({.tensorboard = folder / "file"}), IoError);
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "harness/chrome_trace.h"
#include "harness/junit.h"
#include "harness/made_up_results.h"
#include "harness/table.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::made_up_result;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

std::vector<CaseResult> some_results() {
  return {made_up_result("data_parallel/ranks4/accum3/fp32"), made_up_result("data_parallel/x", Status::fail),
          made_up_result("training/y", Status::invalid), made_up_result("training/z", Status::skip)};
}

TEST(HumanNumbers, CarryThreeDigitsAndAUnit) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
  EXPECT_EQ(human_bytes(std::int64_t{5} << 30), "5.00 GiB");
  EXPECT_EQ(human_count(999.4), "999");
  EXPECT_EQ(human_count(12345), "12.3k");
  EXPECT_EQ(human_count(999600), "1.00M");
  EXPECT_EQ(human_count(std::nan("")), "-");
  EXPECT_EQ(human_seconds(0.0123), "12.3 ms");
  EXPECT_EQ(human_seconds(1.5), "1.50 s");
  EXPECT_EQ(human_seconds(2e-6), "2.00 us");
  EXPECT_EQ(human_share(0.123), "12.3 %");
}

TEST(TextTable, RefusesRowsOfAnotherLength) {
  TextTable table({"a", "b"});
  EXPECT_THROW(table.add({"1"}), ContractError);
}

TEST(Table, AlignsColumnsOnATerminal) {
  const std::vector<std::string> lines = lines_of(render_table(some_results(), TableStyle::terminal));
  ASSERT_EQ(lines.size(), 1U + 4U + 3U + 1U);
  const std::size_t status = lines[0].find("status");
  EXPECT_EQ(lines[1].find("pass"), status);
  EXPECT_EQ(lines[2].find("fail"), status);
  EXPECT_EQ(lines[3].find("invalid"), status);
  EXPECT_TRUE(has(lines[1], "2.05 KiB"));
  EXPECT_TRUE(has(lines[5], "fail: data_parallel/x: because of"));
}

TEST(Table, SeparatesCellsByTabsInAPipe) {
  const std::vector<std::string> lines = lines_of(render_table(some_results(), TableStyle::plain));
  EXPECT_TRUE(lines[1].starts_with("data_parallel/ranks4/accum3/fp32\tpass\t"));
  EXPECT_EQ(std::count(lines[1].begin(), lines[1].end(), '\t'), 6);
}

TEST(Table, CountsInvalidAsFailedInTheClosingLine) {
  EXPECT_TRUE(has(render_table(some_results(), TableStyle::terminal), "1 passed, 2 failed (1 of them invalid), 1 skipped\n"));
  EXPECT_EQ(closing_line({.passed = 3, .failed = 0, .skipped = 0, .invalid = 0}), "3 passed, 0 failed, 0 skipped");
}

TEST(Table, SaysWhereAFailureStarts) {
  std::vector<CaseResult> results = some_results();
  results[1].localisation = Localisation{"h.1.mlp", 1, "mlp", "forward", 3, "[0:4, 0:8]", 0, 0.5, 1e-6, 5e5};
  results[2].localisation_problem = "no trace of rank 2";

  const std::string text = render_table(results, TableStyle::plain);

  EXPECT_TRUE(
      has(text, "<that>\n  starts at h.1.mlp (mlp, forward), rank 3, micro-batch 0, [0:4, 0:8]: error 0.5 = 5e+05 x bound\n"));
  EXPECT_TRUE(has(text, "\n  not localised: no trace of rank 2\n"));
  EXPECT_TRUE(has(to_junit(results), "&lt;that&gt;; starts at h.1.mlp"));
}

TEST(JUnit, GroupsBySuiteAndEscapes) {
  const std::string xml = to_junit(some_results());
  EXPECT_TRUE(has(xml, R"(<testsuites name="tandem" tests="4" failures="1" errors="1">)"));
  EXPECT_TRUE(has(xml, R"(<testsuite name="data_parallel" tests="2" failures="1" errors="0" skipped="0")"));
  EXPECT_TRUE(has(xml, "because of &quot;this&quot; &amp; &lt;that&gt;"));
  EXPECT_TRUE(has(xml, "<skipped message="));
  EXPECT_TRUE(has(xml, "<error type=\"gradients\""));
}

TEST(JUnit, IsWellFormed) {
  if (std::system("xmllint --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "needs xmllint";
  std::vector<CaseResult> results = some_results();
  results[1].verdict.reason = "control \x01 characters \n and lines";
  const auto path = std::filesystem::temp_directory_path() / "tandem_junit_test.xml";
  write_junit(path, results);
  EXPECT_EQ(std::system(("xmllint --noout " + path.string()).c_str()), 0);
  std::filesystem::remove(path);
}

Span span(const std::string& name, Lane lane, std::int64_t begin_ns, std::int64_t end_ns, std::int64_t bytes = 0) {
  Span made;
  made.name = name;
  made.lane = lane;
  made.activity = lane == Lane::compute ? Activity::compute : Activity::transfer;
  made.purpose = Purpose::gradient;
  made.bytes = bytes;
  made.step = 3;
  made.begin_ns = begin_ns;
  made.end_ns = end_ns;
  return made;
}

TEST(ChromeTrace, HasAProcessPerRankAndAThreadPerLane) {
  TraceGroup group{"case a",
                   {{span("forward \"h.0\"\\", Lane::compute, 1'000'000, 1'002'500)},
                    {span("all_reduce", Lane::communication, 1'001'001, 1'001'010, 64)}}};
  const auto document = nlohmann::json::parse(to_chrome_trace({group, group}));

  std::vector<nlohmann::json> events;
  std::vector<std::string> processes;
  for (const auto& event : document["traceEvents"]) {
    if (event["ph"] == "X") events.push_back(event);
    if (event["name"] == "process_name") processes.push_back(event["args"]["name"]);
  }
  EXPECT_EQ(processes, (std::vector<std::string>{"case a rank 0", "case a rank 1", "case a rank 0", "case a rank 1"}));
  ASSERT_EQ(events.size(), 4U);
  EXPECT_EQ(events[0]["name"], "forward \"h.0\"\\");
  EXPECT_EQ(events[0]["ts"], 0.0) << "microseconds from the earliest span";
  EXPECT_EQ(events[0]["dur"], 2.5);
  EXPECT_EQ(events[1]["pid"], 1);
  EXPECT_EQ(events[1]["tid"], 1);
  EXPECT_EQ(events[1]["ts"], 1.001);
  EXPECT_EQ(events[1]["args"]["bytes"], 64);
  EXPECT_EQ(events[1]["args"]["purpose"], "gradient");
  EXPECT_EQ(events[3]["pid"], 1001);
  EXPECT_FALSE(events[0]["args"].contains("bytes"));
}

TEST(ChromeTrace, OfNothingIsStillATrace) { EXPECT_TRUE(nlohmann::json::parse(to_chrome_trace({}))["traceEvents"].empty()); }

}  // namespace
}  // namespace tandem

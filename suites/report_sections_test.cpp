// SPDX-License-Identifier: Apache-2.0
#include "suites/report_sections.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/shard.h"
#include "suites/overlap_cases.h"

namespace tandem {
namespace {

CaseResult passed(const std::string& suite, const std::string& name, std::vector<Property> properties) {
  CaseResult result;
  result.suite = suite;
  result.name = name;
  result.model.hidden = 32;
  result.verdict.status = Status::pass;
  result.verdict.properties = std::move(properties);
  return result;
}

Property bucket(const std::string& buckets, double measured, double predicted) {
  return {"step_seconds_over_predicted, " + buckets,
          measured / predicted,
          Relation::at_most,
          kOverlapFactor + kOverlapSlackSeconds / predicted,
          "",
          -1,
          ""};
}

TEST(ReportSections, RecoversStepTimesOverBucketSize) {
  ResultFile file;
  file.cases = {passed(
      "overlap", "overlap/bucket-size/ranks3",
      {bucket("a bucket for every tensor", 0.25, 0.24), bucket("9888 bytes", 0.151, 0.152), bucket("one bucket", 0.165, 0.162)})};

  const Chart chart = sweep_sections(file).at(0).charts.at(0);

  ASSERT_EQ(chart.series.at(0).y.size(), 3U);
  EXPECT_NEAR(chart.series[0].y[0], 250, 1e-9);
  EXPECT_NEAR(chart.series[1].y[2], 162, 1e-9);
  EXPECT_EQ(chart.series[0].x[1], 9888);
  const double tensors = chart.series[0].x[2] / chart.series[0].x[0];
  EXPECT_NEAR(tensors, static_cast<double>(gpt_parameters(file.cases[0].model).size()), 1e-9);
}

TEST(ReportSections, ShowsWhatACodeSavesAsAShareOfTheLinksTime) {
  const double seconds_at_1000 = 4.0 * 4 * 1024 * 1024 / 1e9;
  ResultFile file;
  file.cases = {passed("compression", "compression/int8/pays/ranks2",
                       {{"seconds_of_sum_saved at 1000 MB/s", 0.5 * seconds_at_1000, Relation::at_least, 0, "", -1, ""},
                        {"seconds_of_sum_saved at 2000 MB/s", -seconds_at_1000, Relation::at_least, -1, "", -1, ""},
                        {"step_speed_up at 100 MB/s", 3, Relation::at_least, 1, "", -1, ""}})};

  const ChartSeries series = sweep_sections(file).at(0).charts.at(0).series.at(0);

  EXPECT_EQ(series.name, "int8");
  ASSERT_EQ(series.x, (std::vector<double>{1e9, 2e9}));
  EXPECT_NEAR(series.y[0], 0.5, 1e-12);
  EXPECT_TRUE(std::isnan(series.y[1])) << "twice the link's time lost is beyond the chart";
}

TEST(ReportSections, LeavesOutWhatDidNotPassAndWhatHasNoSweep) {
  ResultFile file;
  file.cases = {passed("overlap", "overlap/bucket-size/ranks3", {bucket("9888 bytes", 1, 1), bucket("one bucket", 1, 1)}),
                passed("zero", "zero/stage1", {})};
  file.cases[0].verdict.status = Status::fail;
  EXPECT_TRUE(sweep_sections(file).empty());
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "harness/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/rng.h"
#include "harness/made_up_results.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::made_up_file;
using tandem::testing::made_up_result;

// Twenty step times around `seconds` with that relative spread.
std::vector<double> steps(double seconds, double spread, std::uint64_t seed) {
  std::vector<double> samples;
  for (std::uint64_t i = 0; i < 20; ++i) samples.push_back(seconds * (1 + spread * parameter_normal(seed, "steps", i)));
  return samples;
}

ResultFile file_of(std::vector<double> samples) {
  return made_up_file({made_up_result("a/b", Status::pass, std::move(samples))});
}

const MetricComparison& row(const Comparison& comparison, const std::string& metric) {
  for (const MetricComparison& candidate : comparison.rows) {
    if (candidate.metric == metric) return candidate;
  }
  throw ContractError("no row " + metric);
}

Comparison of(const ResultFile& a, const ResultFile& b) { return compare(a, b, "A.json", "B.json"); }

TEST(Compare, TellsSlowerFasterAndSame) {
  const ResultFile base = file_of(steps(0.1, 0.01, 1));

  const Comparison slower = of(base, file_of(steps(0.12, 0.01, 2)));
  EXPECT_EQ(row(slower, "step_seconds").word(), "slower");
  EXPECT_NEAR(row(slower, "step_seconds").ratio.value, 1.2, 0.02);
  EXPECT_EQ(slower.exit_status(), 1);

  const Comparison faster = of(base, file_of(steps(0.08, 0.01, 2)));
  EXPECT_EQ(row(faster, "step_seconds").word(), "faster");
  EXPECT_EQ(faster.exit_status(), 0);

  const Comparison same = of(base, file_of(steps(0.101, 0.01, 2)));
  EXPECT_EQ(row(same, "step_seconds").word(), "same");
  EXPECT_EQ(same.exit_status(), 0);
}

TEST(Compare, SaysWhenItIsTooNoisyToTell) {
  const Comparison noisy = of(file_of(steps(0.1, 0.3, 1)), file_of(steps(0.11, 0.3, 2)));
  EXPECT_EQ(row(noisy, "step_seconds").word(), "too noisy to tell");
  EXPECT_EQ(noisy.exit_status(), 3);
}

TEST(Compare, FindsARunEqualToItself) {
  const ResultFile noisy = file_of(steps(0.1, 0.5, 1));
  const Comparison comparison = of(noisy, noisy);
  EXPECT_EQ(row(comparison, "step_seconds").change, Change::same);
  EXPECT_EQ(comparison.exit_status(), 0);
}

TEST(Compare, HonoursTheThreshold) {
  const ResultFile a = file_of(steps(0.1, 0.001, 1));
  const ResultFile b = file_of(steps(0.108, 0.001, 2));
  EXPECT_EQ(row(compare(a, b, "a", "b", 0.05), "step_seconds").change, Change::worse);
  EXPECT_EQ(row(compare(a, b, "a", "b", 0.1), "step_seconds").change, Change::same);
  EXPECT_THROW((void)compare(a, b, "a", "b", 0), InputError);
  EXPECT_THROW((void)compare(a, b, "a", "b", std::nan("")), InputError);
}

TEST(Compare, CountsMoreBytesAsARegression) {
  const ResultFile a = file_of(steps(0.1, 0.001, 1));
  ResultFile b = a;
  b.cases[0].measurements->peak_bytes[3] *= 3;
  const Comparison comparison = of(a, b);
  EXPECT_EQ(row(comparison, "peak_bytes").word(), "more");
  EXPECT_EQ(comparison.exit_status(), 1);
  EXPECT_EQ(row(of(b, a), "peak_bytes").word(), "less");
  EXPECT_EQ(row(comparison, "bytes_on_wire").word(), "same");
}

TEST(Compare, CountsALostPassAsARegressionAndAnewOneAsFixed) {
  const ResultFile good = made_up_file({made_up_result("a/b")});
  for (const Status status : {Status::fail, Status::invalid}) {
    const ResultFile bad = made_up_file({made_up_result("a/b", status)});
    const Comparison broken = of(good, bad);
    EXPECT_EQ(row(broken, "verdict").word(), "broken");
    EXPECT_EQ(broken.rows.size(), 1U) << "no numbers of a case that did not pass";
    EXPECT_EQ(broken.exit_status(), 1);
    EXPECT_EQ(row(of(bad, good), "verdict").word(), "fixed");
    EXPECT_EQ(row(of(bad, bad), "verdict").change, Change::not_comparable);
    EXPECT_EQ(of(bad, bad).exit_status(), 3);
  }
}

TEST(Compare, CallsDifferentThingsNotComparable) {
  const ResultFile a = file_of(steps(0.1, 0.01, 1));
  const auto reason = [&](auto change) {
    ResultFile b = file_of(steps(0.1, 0.01, 2));
    change(b);
    const Comparison comparison = of(a, b);
    EXPECT_EQ(comparison.exit_status(), 3);
    for (const MetricComparison& candidate : comparison.rows) {
      if (candidate.change == Change::not_comparable) return candidate.reason;
    }
    return std::string("all comparable");
  };
  EXPECT_EQ(reason([](ResultFile& b) { b.cases[0].plan.parallel.data = 2; }), "plan.data differs");
  EXPECT_EQ(reason([](ResultFile& b) { b.cases[0].model.layers = 9; }), "model.layers differs");
  EXPECT_TRUE(has(reason([](ResultFile& b) { b.environment.backend = "cuda"; }), "other backend"));
  EXPECT_TRUE(has(reason([](ResultFile& b) { b.environment.link = "10GbE"; }), "other link"));
  EXPECT_TRUE(has(reason([](ResultFile& b) { b.environment.adversary = "3"; }), "other adversary"));
  EXPECT_TRUE(has(reason([](ResultFile& b) { b.environment.pitfalls = {"bound_widened"}; }), "B was made with pitfalls on"));
  EXPECT_TRUE(has(reason([](ResultFile& b) { b.cases[0].measurements.reset(); }), "B has no measurements"));
  EXPECT_TRUE(has(reason([](ResultFile& b) { b.cases[0].verdict.status = Status::skip; }), "pass in A, skip in B"));
  EXPECT_TRUE(has(reason([](ResultFile& b) { b.cases.clear(); }), "in A only"));
  EXPECT_TRUE(has(reason([](ResultFile& b) { b.cases.push_back(made_up_result("a/new")); }), "in B only"));
}

TEST(Compare, LeavesOutWhatIsSkippedOnBothSides) {
  const ResultFile skipped = made_up_file({made_up_result("a/b", Status::skip)});
  const Comparison comparison = of(skipped, skipped);
  EXPECT_TRUE(comparison.rows.empty());
  EXPECT_EQ(comparison.exit_status(), 3) << "nothing was compared";
}

TEST(Compare, NotesWhatDiffersBetweenTheRuns) {
  const ResultFile a = file_of(steps(0.1, 0.01, 1));
  ResultFile b = a;
  b.environment.cpu = "another one";
  const Comparison comparison = of(a, b);
  ASSERT_EQ(comparison.notes.size(), 1U);
  EXPECT_TRUE(has(comparison.notes[0], "B another one"));
}

TEST(Compare, LinksAndThreadsMayDifferBetweenMachines) {
  const ResultFile a = file_of(steps(0.1, 0.01, 1));
  ResultFile b = file_of(steps(0.2, 0.01, 2));
  b.environment.link = "slow";
  b.cases[0].plan.threads_per_rank = 2;
  const Comparison machines = compare(a, b, "A.json", "B.json", {.machines = true});
  EXPECT_EQ(row(machines, "step_seconds").change, Change::worse);
  ASSERT_FALSE(machines.notes.empty());
  EXPECT_EQ(machines.notes[0], "link: A none, B slow");
  b.cases[0].plan.batch.rows = 99;
  EXPECT_TRUE(has(compare(a, b, "A", "B", {.machines = true}).rows[0].reason, "plan.rows differs"));
}

TEST(Compare, FourSamplesDecideByTheExactIntervalAndThreeDoNot) {
  const auto compared = [](std::vector<double> a, std::vector<double> b) {
    return row(of(file_of(std::move(a)), file_of(std::move(b))), "step_seconds");
  };
  const MetricComparison four = compared({1.0, 1.01, 1.02, 1.03}, {1.2, 1.21, 1.22, 1.23});
  EXPECT_EQ(four.change, Change::worse);
  EXPECT_NEAR(four.coverage, 1 - 2.0 / 70, 1e-12);
  EXPECT_DOUBLE_EQ(four.ratio.ci95.low, 1.2 / 1.03);
  EXPECT_DOUBLE_EQ(four.effect, 1);
  const MetricComparison three = compared({1.0, 1.01, 1.02}, {1.2, 1.21, 1.22});
  EXPECT_EQ(three.change, Change::too_noisy) << "one case of three samples is none";
  EXPECT_TRUE(has(three.reason, "90 %"));
}

// Quick cases take three samples each: together they tell what none of them does.
TEST(Compare, DecidesCasesOfFewSamplesTogether) {
  const auto file = [](double factor) {
    std::vector<CaseResult> cases;
    for (int i = 0; i < 8; ++i) {
      const double seconds = factor * (0.01 + 0.005 * i) * (1 + 0.01 * parameter_normal(i, "case", 0));
      cases.push_back(made_up_result("s/case" + std::to_string(i), Status::pass, {seconds, 1.02 * seconds, 0.98 * seconds}));
    }
    return made_up_file(std::move(cases));
  };
  const Comparison same = of(file(1), file(1.001));
  EXPECT_EQ(same.count(Change::few_samples), 8);
  EXPECT_EQ(same.exit_status(), 0);
  const Comparison slower = of(file(1), file(1.3));
  const MetricComparison& all = slower.rows.back();
  EXPECT_EQ(all.case_name, "all 8 cases");
  EXPECT_EQ(all.word(), "slower");
  EXPECT_NEAR(all.ratio.value, 1.3, 1e-9);
  EXPECT_EQ(slower.exit_status(), 1);
}

TEST(Compare, CasesOfOtherRankCountsAreComparedPerTokenAndRank) {
  const auto file = [](int ranks, double seconds, std::int64_t hidden) {
    CaseResult result = made_up_result("s/ranks" + std::to_string(ranks) + "/fp32", Status::pass, steps(seconds, 0.001, ranks));
    result.plan.parallel.data = ranks;
    result.model.hidden = hidden;
    return made_up_file({result});
  };
  // Twice the ranks on the same tokens in 0.6 of the time: 1 / (2 0.6) of the work of each rank's second.
  const Comparison comparison = of(file(2, 0.1, 32), file(4, 0.06, 32));
  ASSERT_EQ(comparison.rows.size(), 1U);
  EXPECT_EQ(comparison.rows[0].case_name, "s/ranks*/fp32 (2 and 4 ranks)");
  EXPECT_NEAR(comparison.rows[0].ratio.value, 1.2, 0.01);
  EXPECT_TRUE(has(comparison.rows[0].reason, "efficiency of B against A 0.83"));
  const Comparison refused = of(file(2, 0.1, 32), file(4, 0.06, 64));
  EXPECT_EQ(refused.rows[0].change, Change::not_comparable);
  EXPECT_TRUE(has(refused.rows[0].reason, "another model"));
}

TEST(Compare, SaysWhetherTheNumbersAreTheSame) {
  const ResultFile a = file_of(steps(0.1, 0.01, 1));
  ResultFile b = a;
  EXPECT_EQ(of(a, b).numbers_identical, 1);
  b.cases[0].verdict.tensors.back().error *= 1.5;
  const Comparison other = of(a, b);
  EXPECT_EQ(other.numbers_compared, 1);
  EXPECT_EQ(other.numbers_identical, 0);
  EXPECT_TRUE(has(other.first_other_numbers, a.cases[0].verdict.tensors.back().tensor));
}

TEST(Compare, SeveralFilesAreComparedWithTheFirst) {
  const ResultFile a = file_of(steps(0.1, 0.01, 1));
  const std::vector<Comparison> both = {of(a, file_of(steps(0.101, 0.01, 2))), of(a, file_of(steps(0.13, 0.01, 3)))};
  EXPECT_EQ(exit_status(both), 1);
  EXPECT_EQ(exit_status({both[0]}), 0);
  const auto json = nlohmann::json::parse(to_json(both));
  EXPECT_EQ(json["comparisons"].size(), 2U);
  EXPECT_EQ(json["exit_status"], 1);
  EXPECT_TRUE(has(render(both, TableStyle::plain), "gap belongs to"));
}

TEST(Compare, RendersTextAndJson) {
  const Comparison comparison = of(file_of(steps(0.1, 0.01, 1)), file_of(steps(0.12, 0.01, 2)));
  const std::string text = render(comparison, TableStyle::terminal);
  EXPECT_TRUE(has(text, "slower"));
  EXPECT_TRUE(has(text, "regression"));
  EXPECT_TRUE(has(text, "A: A.json"));
  const auto json = nlohmann::json::parse(to_json(comparison));
  EXPECT_EQ(json["exit_status"], 1);
  EXPECT_EQ(json["summary"]["worse"], 1);
  EXPECT_EQ(json["rows"].size(), comparison.rows.size());
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "harness/report/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <set>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "harness/made_up_results.h"
#include "harness/report/chart.h"
#include "harness/report/plain_text.h"
#include "harness/report/result_charts.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::made_up_file;
using tandem::testing::made_up_result;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr const char* kHostile = "a'b\"c\\d_e@f %s%d `id` $x <script>alert(1)</script> &amp; {/b}\n]]> é";

bool has_gnuplot() {
  try {
    static_cast<void>(run_gnuplot("set terminal svg\nplot x\n", ChartFormat::svg));
    return true;
  } catch (const InputError&) {
    return false;
  }
}

class DrawnChart : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_gnuplot()) GTEST_SKIP() << "gnuplot is not here";
  }
};
class Html : public DrawnChart {};
class Export : public DrawnChart {};

Chart some_chart(const std::string& text = "name") {
  return {
      .id = "some_chart",
      .title = text,
      .caption = text,
      .x_label = text,
      .y_label = text,
      .log_x = true,
      .series = {{.name = text, .x = {1, 10, 100}, .y = {1, kNaN, 3}, .labels = {text, "", text}},
                 {.name = "marks", .x = {1, 10, 100}, .y = {2, 2, 2}, .low = {1, kNaN, 1}, .high = {3, 3, 3}, .points = true}}};
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++count;
  return count;
}

std::string message_of(const std::string& json) {
  try {
    static_cast<void>(sections_from_json(json, "s.json"));
    return "no error";
  } catch (const InputError& error) {
    return error.what();
  }
}

CaseResult measured_case(const std::string& name) {
  CaseResult result = made_up_result(name);
  Measurements& measured = *result.measurements;
  measured.compute_share = 0.6;
  measured.exposed_share = 0.3;
  measured.data_share = measured.checkpoint_share = 0;
  measured.idle_share = 0.1;
  return result;
}

TEST(PlainText, EscapesWhatIsMarkup) { EXPECT_EQ(escaped("<a href=\"x\">'&\n"), "&lt;a href=&quot;x&quot;&gt;&#39;&amp; "); }

TEST(PlainText, ReplacesWhatXmlCannotCarry) {
  EXPECT_EQ(printable(std::string("a\0b\x1b\xff\xc3(", 7)), "a b ?\?(");
  EXPECT_EQ(printable("\xEF\xBF\xBF!"), "?!");
  EXPECT_EQ(printable("é…"), "é…");
}

TEST(PlainText, ShortensByCharactersInTheMiddle) {
  EXPECT_EQ(shortened("abcdefghij", 5), "ab…ij");
  EXPECT_EQ(shortened("ééééééé", 5), "éé…éé");
  EXPECT_EQ(shortened("abcde", 5), "abcde");
}

TEST(Sections, SurviveTheWayThroughJson) {
  ReportSection section{.title = kHostile, .text = "text", .charts = {some_chart()}, .table = {{"a", "b"}, {"1", "2"}}};
  section.charts[0].series[0].y = {kNaN, std::numeric_limits<double>::infinity(), -1.5e-300};
  section.charts[0].rows = {"r"};
  section.charts[0].diagonal = true;

  const std::string json = to_json({section});
  const std::vector<ReportSection> read = sections_from_json(json, "s.json");

  ASSERT_TRUE(holds_sections(json));
  EXPECT_EQ(read.at(0).title, kHostile);
  EXPECT_EQ(read.at(0).table, section.table);
  EXPECT_TRUE(read.at(0).charts.at(0).diagonal);
  EXPECT_TRUE(std::isnan(read[0].charts[0].series.at(0).y.at(0)));
  EXPECT_EQ(to_json(read), json);
}

TEST(Sections, NamesTheFieldThatIsWrong) {
  const auto with_chart = [](const std::string& chart) {
    return R"({"sections_version": 1, "sections": [{"title": "t", "charts": [)" + chart + "]}]}";
  };
  EXPECT_TRUE(has(message_of(R"({"sections_version": 2, "sections": []})"), "s.json: field 'sections_version'"));
  EXPECT_TRUE(has(message_of(R"({"sections_version": 1, "sections": [{}]})"), "'sections[0].title' is missing"));
  EXPECT_TRUE(has(message_of(with_chart(R"({"id": "../x", "title": "", "series": []})")), "has the id '../x'"));
  EXPECT_TRUE(has(message_of(with_chart(R"({"id": "x", "title": "", "series": [{"name": "n", "x": [1], "y": []}]})")),
                  "'sections[0].charts[0]' has a series 'n' whose lists differ in length"));
  EXPECT_TRUE(has(message_of(R"({"sections_version": 1, "sections": [{"title": "t", "table": [["a"], []]}]})"), "table[1]"));
  EXPECT_TRUE(has(message_of("{"), "not JSON"));
  EXPECT_FALSE(holds_sections("{\"cases\": []}"));
  EXPECT_FALSE(holds_sections("[1"));
}

TEST(Chart, RefusesWhatContradictsItself) {
  Chart chart = some_chart();
  chart.series[0].x.pop_back();
  EXPECT_THROW(static_cast<void>(gnuplot_script(chart, ChartFormat::page)), ContractError);
}

TEST(Chart, GivesTextToGnuplotInSingleQuotesOnOneLine) {
  const std::string script = gnuplot_script(some_chart(kHostile), ChartFormat::svg);
  EXPECT_TRUE(has(script, "'a''b\"c\\d_e@f"));
  EXPECT_EQ(script.find("{/b}\n]]>"), std::string::npos);
  EXPECT_EQ(count_of(script, "noenhanced"), 1U);
}

TEST_F(DrawnChart, ShowsHostileTextAsText) {
  Chart chart = some_chart(kHostile);
  Chart rows{.id = "rows", .title = kHostile, .x_label = kHostile, .rows = {kHostile, "50 %d"}};
  rows.series = {{.name = kHostile, .x = {}, .y = {0, 1}, .low = {0, 1}, .high = {2, 3}, .spans = true}};

  const std::string svg = render_svg(chart), bars = render_svg(rows);

  for (const std::string& drawn : {svg, bars}) {
    EXPECT_EQ(drawn.find("<script"), std::string::npos);
    EXPECT_TRUE(has(drawn, "a'b\"c\\d_e@f"));
    EXPECT_EQ(count_of(drawn, "<svg"), 1U);
    EXPECT_EQ(drawn.find("uid="), std::string::npos) << "a shell has seen the text";
  }
  EXPECT_TRUE(has(bars, "50 %d"));
}

TEST_F(DrawnChart, IsTheSameBytesInEveryRunAndTakesTheColourOfThePage) {
  const std::string svg = render_svg(some_chart());
  EXPECT_EQ(svg, render_svg(some_chart()));
  EXPECT_TRUE(has(svg, "currentColor"));
  EXPECT_EQ(svg.find("black"), std::string::npos);
  EXPECT_EQ(svg.find("id='gp"), std::string::npos) << "an id that every chart of a page would share";
}

TEST_F(DrawnChart, KnowsNoSettingsOfTheUser) {
  const std::string svg = render_svg(some_chart());
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "tandem_report_home";
  std::filesystem::create_directories(folder);
  write_file_atomically(folder / ".gnuplot", "set title 'of the user'\n");
  const char* const home = std::getenv("HOME");
  const std::string before = home == nullptr ? "/" : home;
  setenv("HOME", folder.c_str(), 1);
  const std::string again = render_svg(some_chart());
  setenv("HOME", before.c_str(), 1);
  std::filesystem::remove_all(folder);
  EXPECT_EQ(svg, again);
}

TEST_F(DrawnChart, DrawsWhatHasNothingToDraw) {
  Chart empty{.id = "empty", .title = "empty", .log_y = true};
  EXPECT_TRUE(has(render_svg(empty), "nothing to draw"));
  empty.series = {{.name = "below the log", .x = {1, 2}, .y = {0, -1}}, {.name = "no number", .x = {kNaN}, .y = {kNaN}}};
  EXPECT_TRUE(has(render_svg(empty), "nothing to draw"));
  Chart lone{.id = "lone", .title = "", .log_x = true, .stacked = true};
  lone.series = {{.name = "a", .x = {64}, .y = {0.5}}, {.name = "b", .x = {64}, .y = {0.5}}};
  EXPECT_EQ(count_of(render_svg(lone), "<polygon"), 4U) << "two columns and two keys";
}

TEST(Chart, SaysWhatToInstallWhereThereIsNoGnuplot) {
  const char* const path = std::getenv("PATH");
  const std::string before = path == nullptr ? "" : path;
  setenv("PATH", "/nonexistent", 1);
  std::string said;
  try {
    static_cast<void>(render_svg(some_chart()));
  } catch (const InputError& error) {
    said = error.what();
  }
  setenv("PATH", before.c_str(), 1);
  EXPECT_TRUE(has(said, "apt-get install gnuplot-nox"));
}

TEST_F(DrawnChart, SaysWhatThisGnuplotCannotWrite) {
  EXPECT_THROW(static_cast<void>(run_gnuplot("set terminal no_such_terminal\nplot x\n", ChartFormat::pdf)), InputError);
  EXPECT_THROW(static_cast<void>(run_gnuplot("set terminal svg\nplat x\n", ChartFormat::svg)), IoError);
}

TEST(ResultSections, PutEveryJudgedCaseBesideItsBound) {
  CaseResult exact = made_up_result("zero/exact"), fails = made_up_result("zero/fails", Status::fail);
  exact.verdict.error_over_bound = 0;
  fails.verdict.error_over_bound = std::numeric_limits<double>::infinity();
  CaseResult passes = made_up_result("data_parallel/x");
  passes.verdict.error_over_bound = 0.5;
  CaseResult skipped = made_up_result("zero/skipped", Status::skip);

  const Chart chart = result_sections(made_up_file({exact, fails, passes, skipped})).at(0).charts.at(0);

  ASSERT_EQ(chart.rows, (std::vector<std::string>{"zero", "data_parallel"}));
  ASSERT_EQ(chart.series.size(), 4U);
  EXPECT_EQ(chart.series[0].name, "pass");
  EXPECT_EQ(chart.series[0].x, (std::vector<double>{0.5}));
  EXPECT_NEAR(chart.series[0].y[0], 1, 0.5);
  EXPECT_EQ(chart.series[1].name, "fail or invalid");
  EXPECT_GT(chart.series[1].x.at(0), 1);
  EXPECT_EQ(chart.series[2].x.size(), 1U) << "equal bits have a place left of all others";
  EXPECT_LT(chart.series[2].x.at(0), 0.5);
  EXPECT_EQ(chart.series[3].x, (std::vector<double>{1, 1}));
}

TEST(ResultSections, PairMeasuredWithPredictedAndSplitTheTimeOfAStep) {
  CaseResult a = measured_case("zero/a");
  a.measurements->predicted_peak_bytes[2] = 290;  // of 300
  const std::vector<ReportSection> sections = result_sections(made_up_file({a, measured_case("zero/b")}));

  ASSERT_EQ(sections.size(), 3U);
  const Chart& memory = sections[1].charts.at(0);
  ASSERT_EQ(memory.series.size(), kMemoryCategories);
  EXPECT_TRUE(memory.series[3].y.empty()) << "has no prediction";
  EXPECT_EQ(memory.series[2].name, "optimizer");
  EXPECT_EQ(memory.series[2].x, (std::vector<double>{290, 300}));
  EXPECT_EQ(memory.series[2].y, (std::vector<double>{300, 300}));
  EXPECT_TRUE(has(memory.caption, "optimizer 1.000 to 1.034 (2 cases)"));
  const Chart& split = sections[2].charts.at(0);
  ASSERT_EQ(split.rows.size(), 2U);
  EXPECT_TRUE(has(split.rows[0], "a 110 ms"));
  EXPECT_NEAR(split.series.at(1).low.at(0), 60, 1e-9);
  EXPECT_NEAR(split.series.at(1).high.at(0), 90, 1e-9);
  EXPECT_NEAR(split.series.back().high.at(1), 100, 1e-9);
}

TraceGroup two_ranks() {
  TraceGroup group{"case \"x\"", {{}, {}}};
  for (auto& spans : group.spans_by_rank) {
    for (int step = 0; step < 2; ++step) {
      const std::int64_t at = step * 20'000'000;
      spans.push_back({"forward", Activity::compute, Purpose::other, Lane::compute, 0, step, at, at + 4'000'000});
      spans.push_back(
          {"sum", Activity::transfer, Purpose::gradient, Lane::communication, 8, step, at + 3'000'000, at + 9'000'000});
      spans.push_back({"step", Activity::step, Purpose::other, Lane::compute, 0, step, at, at + 10'000'000});
    }
  }
  return group;
}

TEST(Timeline, DrawsTheLastStepByRankAndLane) {
  const Chart chart = timeline_chart(two_ranks());

  EXPECT_EQ(chart.rows, (std::vector<std::string>{"rank 0", "link", "rank 1", "link"}));
  ASSERT_EQ(chart.series.size(), 6U);
  EXPECT_EQ(chart.series[1].name, "transfer");
  EXPECT_EQ(chart.series[1].y, (std::vector<double>{1, 3}));
  EXPECT_DOUBLE_EQ(chart.series[1].low[0], 3);
  EXPECT_DOUBLE_EQ(chart.series[1].high[0], 9);
  EXPECT_TRUE(has(chart.title, "case \"x\", step 1"));
}

TEST(Timeline, JoinsWhatIsTooMuchToDraw) {
  TraceGroup group{"many", std::vector<std::vector<Span>>(20)};
  for (auto& spans : group.spans_by_rank) {
    spans.push_back({"step", Activity::step, Purpose::other, Lane::compute, 0, 0, 0, 50'000'000});
    for (std::int64_t at = 0; at < 50'000'000; at += 50'000) {
      spans.push_back({"short", Activity::compute, Purpose::other, Lane::compute, 0, 0, at, at + 20'000});
    }
  }

  const Chart chart = timeline_chart(group);

  EXPECT_EQ(chart.rows.size(), 32U);
  EXPECT_LE(chart.series.at(0).y.size(), 2000U);
  EXPECT_GE(chart.series.at(0).y.size(), 16U);
  EXPECT_TRUE(has(chart.caption, "16 of 20 ranks"));
}

TEST(Timeline, ReadsWhatTheTraceWriterWrote) {
  const std::vector<TraceGroup> read = read_chrome_trace(to_chrome_trace({two_ranks(), two_ranks()}), "t.json");

  ASSERT_EQ(read.size(), 1U) << "runs of one name";
  EXPECT_EQ(read[0].name, "case \"x\"");
  ASSERT_EQ(read[0].spans_by_rank.size(), 2U);
  const Span& span = read[0].spans_by_rank[1].at(1);
  EXPECT_EQ(span.name, "sum");
  EXPECT_EQ(span.activity, Activity::transfer);
  EXPECT_EQ(span.lane, Lane::communication);
  EXPECT_EQ(span.begin_ns, 3'000'000);
  EXPECT_EQ(span.end_ns, 9'000'000);
}

TEST(Timeline, RefusesWhatIsNoTrace) {
  const std::string whole = to_chrome_trace({two_ranks()});
  EXPECT_THROW(static_cast<void>(read_chrome_trace(whole.substr(0, whole.size() / 2), "t.json")), InputError);
  EXPECT_THROW(static_cast<void>(read_chrome_trace("{}", "t.json")), InputError);
  EXPECT_THROW(static_cast<void>(read_chrome_trace("[]", "t.json")), InputError);
  EXPECT_THROW(static_cast<void>(read_chrome_trace(R"({"traceEvents":[{"ph":"X","cat":"step","ts":"a"}]})", "t.json")),
               InputError);
}

TEST_F(Html, HoldsAllPartsAndNothingThatIsLoaded) {
  CaseResult named = measured_case("zero/<script>alert(1)</script>'\"_");
  CaseResult fails = made_up_result("zero/fails", Status::fail);
  ReportInput input{
      .results = {{"<a>.json", made_up_file({named, fails})}},
      .sections = {{.title = kHostile, .text = kHostile, .charts = {some_chart(kHostile)}, .table = {{"h"}, {kHostile}}}},
      .traces = {two_ranks()}};
  input.results[0].second.environment.pitfalls = {"dead_comparison"};

  const std::string page = render_html(input);

  for (const char* part : {"Verdicts", "1 passed, 1 failed", "because of &quot;this&quot; &amp; &lt;that&gt;", "Error over bound",
                           "Peak memory, measured and predicted", "Time split: zero", "step 1", "dead_comparison", "Environment",
                           "tandem report: &lt;a&gt;.json"}) {
    EXPECT_TRUE(page.find(part) != std::string::npos) << part;
  }
  for (const char* loads : {"<script", "src=", "<link", "@import", "url(", "<iframe"})
    EXPECT_EQ(count_of(page, loads), 0U) << loads;
  EXPECT_EQ(count_of(page, "<h2 id="), count_of(page, "<li><a href=\"#part-"));
}

TEST_F(Html, ComparesFromTwoResultsOnAndGivesEveryChartAnIdOfItsOwn) {
  const ResultFile file = made_up_file({measured_case("zero/a")});
  const ReportInput input{.results = {{"a.json", file}, {"b.json", file}},
                          .sections = {{.title = "s", .charts = {some_chart()}}}};

  const std::string page = render_html(input);

  EXPECT_TRUE(page.find("b.json (B) against a.json (A)") != std::string::npos);
  std::set<std::string> ids;
  for (std::size_t at = 0; (at = page.find(" id=", at)) != std::string::npos; ++at) {
    const std::string id = page.substr(at + 5, page.find(page[at + 4], at + 5) - at - 5);
    EXPECT_TRUE(ids.insert(id).second) << id;
  }
  EXPECT_GT(ids.size(), 5U);
}

TEST_F(Export, WritesEveryChartAsAFileOfItsOwn) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "tandem_report_test";
  std::filesystem::create_directories(folder);
  ReportInput input{.sections = {{.title = "s", .charts = {some_chart(kHostile)}}}};
  const std::vector<std::pair<std::string, std::string>> kBegins = {{"png", "\x89PNG"}, {"pdf", "%PDF-"}, {"svg", "<?xml"}};
  for (const auto& [format, begin] : kBegins) {
    const auto files = export_charts(input, folder, format);
    ASSERT_EQ(files, (std::vector<std::filesystem::path>{folder / ("some_chart." + format)}));
    EXPECT_TRUE(read_text_file(files[0]).starts_with(begin)) << files[0];
  }
  input.sections.push_back(input.sections[0]);
  EXPECT_EQ(export_charts(input, folder, "svg").at(1), folder / "some_chart-2.svg");
  EXPECT_THROW(static_cast<void>(export_charts(input, folder, "gif")), InputError);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tandem

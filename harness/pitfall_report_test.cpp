// SPDX-License-Identifier: Apache-2.0
#include "harness/pitfall_report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "harness/made_up_results.h"

namespace tandem {
namespace {

using Json = nlohmann::json;
using tandem::testing::has;
using tandem::testing::made_up_result;

std::string project_file() { return read_text_file(TANDEM_SOURCE_DIR "/suites/pitfalls.json"); }

std::string text_of_reading(const Json& document) {
  try {
    (void)pitfalls_from_json(document.dump(), "pitfalls.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

PitfallInfo some_pitfall() {
  PitfallInfo info;
  info.pitfall = Pitfall::verdict_of_rank_zero;
  info.with = {Pitfall::last_rank_gradient_scaled};
  info.caught_by = {"a/expected"};
  info.what = "The verdict looks at rank 0 alone.";
  return info;
}

TEST(Pitfalls, TheProjectDescribesEachOnce) {
  const std::vector<PitfallInfo> infos = pitfalls_from_json(project_file(), "suites/pitfalls.json");
  ASSERT_EQ(infos.size(), kPitfalls);
  for (std::size_t i = 0; i < infos.size(); ++i) {
    EXPECT_EQ(infos[i].pitfall, all_pitfalls()[i]);
    EXPECT_FALSE(infos[i].what.empty() || infos[i].technique.empty() || infos[i].modelled_on.empty() ||
                 infos[i].caught_by.empty());
    EXPECT_EQ(infos[i].technique == "harness", !infos[i].with.empty())
        << "faults of the harness come in pairs: " << name(infos[i].pitfall);
  }
}

TEST(Pitfalls, NamesWhatIsWrongInTheFile) {
  const Json good = Json::parse(project_file());
  EXPECT_EQ(text_of_reading(good), "no error");
  Json bad = good;
  bad["pitfalls"].erase(0);
  EXPECT_TRUE(has(text_of_reading(bad), "does not describe pitfall mean_of_micro_batch_means"));
  bad = good;
  bad["pitfalls"].push_back(good["pitfalls"][0]);
  EXPECT_TRUE(has(text_of_reading(bad), "describes pitfall mean_of_micro_batch_means twice"));
  bad = good;
  bad["pitfalls"][2]["name"] = "nonsense";
  EXPECT_TRUE(has(text_of_reading(bad), "pitfalls.json: /pitfalls/2/name is 'nonsense', which is no pitfall"));
  bad = good;
  bad["pitfalls"][2].erase("what");
  EXPECT_TRUE(has(text_of_reading(bad), "/pitfalls/2/what is missing"));
  bad = good;
  bad["pitfalls"][2]["caught_by"] = "data_parallel";
  EXPECT_TRUE(has(text_of_reading(bad), "/pitfalls/2/caught_by must be a list of texts"));
  bad = good;
  bad["pitfalls"][2]["caught_by"] = Json::array();
  EXPECT_TRUE(has(text_of_reading(bad), "/pitfalls/2/caught_by is empty"));
  bad = good;
  bad["pitfalls"][2]["catched_by"] = "x";
  EXPECT_TRUE(has(text_of_reading(bad), "/pitfalls/2/catched_by is an unknown key"));
  EXPECT_TRUE(has(text_of_reading(Json::array()), "must be an object"));
}

TEST(Pitfalls, SwitchesOnAHarnessFaultTogetherWithItsPartner) {
  const PitfallSet on = some_pitfall().switched_on();
  EXPECT_TRUE(on.on(Pitfall::verdict_of_rank_zero) && on.on(Pitfall::last_rank_gradient_scaled));
  EXPECT_EQ(on.list().size(), 2U);
}

TEST(Pitfalls, WantsItsCatchersToExist) {
  Case entry;
  entry.name = "a/expected/fp32";
  EXPECT_NO_THROW(check_catchers({some_pitfall()}, {entry}));
  entry.name = "a/expectedly";
  EXPECT_THROW(check_catchers({some_pitfall()}, {entry}), InputError);
}

TEST(PitfallReport, CallsItMissedWhenAllCasesPassOrNoneRan) {
  const PitfallOutcome passed = assess(some_pitfall(), {made_up_result("a/expected"), made_up_result("a/other")});
  EXPECT_FALSE(passed.caught);
  EXPECT_EQ(passed.cases_run, 2);
  const PitfallOutcome skipped = assess(some_pitfall(), {made_up_result("a/expected", Status::skip)});
  EXPECT_FALSE(skipped.caught);
  EXPECT_EQ(skipped.cases_run, 0);
  EXPECT_FALSE(all_caught({skipped}));
  EXPECT_TRUE(has(render({passed, skipped}, TableStyle::plain), "no case ran"));
  EXPECT_TRUE(has(render({passed, skipped}, TableStyle::plain), "all 2 cases passed"));
  EXPECT_EQ(mutation_score({passed, skipped}), "0 of 2 caught");
}

TEST(PitfallReport, SaysWhichCheckCaughtItWhereAndWhen) {
  for (const Status status : {Status::fail, Status::invalid}) {
    const PitfallOutcome outcome = assess(
        some_pitfall(), {made_up_result("a/good"), made_up_result("a/other", status), made_up_result("a/expected/x", status)});
    EXPECT_TRUE(outcome.caught && outcome.by_expected_case);
    EXPECT_EQ(outcome.case_name, "a/expected/x") << "the case that should catch it is the one reported";
    EXPECT_EQ(outcome.cases_caught, 2);
    EXPECT_EQ(outcome.check, "gradients");
    EXPECT_EQ(outcome.first_bad_step, 2);
    EXPECT_EQ(outcome.first_bad_tensor, "h.1.mlp.c_fc.weight");
    EXPECT_EQ(outcome.status, status);
    const std::string text = render({outcome}, TableStyle::plain);
    EXPECT_TRUE(has(
        text, "verdict_of_rank_zero + last_rank_gradient_scaled\t-\tcaught\tgradients\t2\th.1.mlp.c_fc.weight\ta/expected/x"));
    EXPECT_TRUE(has(text, "1 of 1 caught"));
  }
}

TEST(PitfallReport, NotesACatchByAnotherCase) {
  const PitfallOutcome outcome = assess(some_pitfall(), {made_up_result("a/expected"), made_up_result("a/other", Status::fail)});
  EXPECT_TRUE(outcome.caught);
  EXPECT_FALSE(outcome.by_expected_case);
  EXPECT_TRUE(has(render({outcome}, TableStyle::terminal), "was caught, but not by a/expected"));
}

TEST(PitfallReport, WritesJson) {
  const PitfallOutcome caught = assess(some_pitfall(), {made_up_result("a/expected", Status::fail)});
  const PitfallOutcome missed = assess(some_pitfall(), {made_up_result("a/expected")});
  const Json document = Json::parse(to_json(std::vector<PitfallOutcome>{caught, missed}));
  EXPECT_EQ(document["summary"]["caught"], 1);
  EXPECT_EQ(document["summary"]["total"], 2);
  EXPECT_EQ(document["pitfalls"][0]["check"], "gradients");
  EXPECT_TRUE(document["pitfalls"][1]["check"].is_null());
}

}  // namespace
}  // namespace tandem

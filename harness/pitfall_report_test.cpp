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
  bad = good;
  bad["pitfalls"][2]["first_bad_tensor"] = Json::array({"h.*"});
  EXPECT_TRUE(has(text_of_reading(bad), "/pitfalls/2/first_bad_tensor must be a text"));
  bad["pitfalls"][2]["first_bad_tensor"] = "";
  EXPECT_TRUE(has(text_of_reading(bad), "/pitfalls/2/first_bad_tensor is empty"));
  bad = good;
  bad["pitfalls"][2]["not_caught_by"] = "a/one";
  EXPECT_TRUE(has(text_of_reading(bad), "/pitfalls/2/not_caught_by must be a list of texts"));
  bad["pitfalls"][2]["not_caught_by"] = Json::array();
  EXPECT_TRUE(has(text_of_reading(bad), "/pitfalls/2/not_caught_by is empty"));
  EXPECT_TRUE(has(text_of_reading(Json::array()), "must be an object"));
}

TEST(Pitfalls, MayPredictTheTensorAndWhatCannotShowIt) {
  Json document = Json::parse(project_file());
  document["pitfalls"][0]["first_bad_tensor"] = "h.*.bias";
  document["pitfalls"][0]["not_caught_by"] = Json::array({"a/one", "a/two"});
  document["pitfalls"][1].erase("first_bad_tensor");
  document["pitfalls"][1].erase("not_caught_by");
  const std::vector<PitfallInfo> infos = pitfalls_from_json(document.dump(), "pitfalls.json");
  EXPECT_EQ(infos[0].first_bad_tensor, "h.*.bias");
  EXPECT_EQ(infos[0].not_caught_by, (std::vector<std::string>{"a/one", "a/two"}));
  EXPECT_EQ(infos[0].patterns().size(), infos[0].caught_by.size() + 2);
  EXPECT_TRUE(infos[1].first_bad_tensor.empty() && infos[1].not_caught_by.empty());
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

std::string text_of_checking(const PitfallInfo& info, const std::vector<std::string>& names) {
  CaseList cases;
  for (const std::string& name : names) cases.emplace_back().name = name;
  try {
    check_catchers({info}, cases);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Pitfalls, WantsTheCasesThatMustPassToExistAndToLeaveSomeThatMustNot) {
  PitfallInfo info = some_pitfall();
  info.caught_by = {"a/*"};
  info.not_caught_by = {"a/ranks1"};
  EXPECT_EQ(text_of_checking(info, {"a/ranks1/fp32", "a/ranks2/fp32"}), "no error");
  EXPECT_TRUE(has(text_of_checking(info, {"a/ranks2/fp32"}), "should not be caught by 'a/ranks1', but no case is called so"));
  EXPECT_TRUE(has(text_of_checking(info, {"a/ranks1/fp32"}), "should be caught by 'a/*', but not_caught_by says"));
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

CaseResult failing_at(const std::string& name, const std::string& bad_tensor, const std::string& starts_at = "") {
  CaseResult result = made_up_result(name, Status::fail);
  result.verdict.first_bad_tensor = bad_tensor.empty() ? std::nullopt : std::optional(bad_tensor);
  if (!starts_at.empty()) result.localisation.emplace().tensor = starts_at;
  return result;
}

PitfallInfo predicting(const std::string& first_bad_tensor, std::vector<std::string> not_caught_by = {}) {
  PitfallInfo info = some_pitfall();
  info.first_bad_tensor = first_bad_tensor;
  info.not_caught_by = std::move(not_caught_by);
  return info;
}

TEST(PitfallReport, HoldsAPredictionAgainstTheVerdictAndTheLocalisation) {
  const std::vector<CaseResult> by_verdict = {failing_at("a/expected", "h.1.attn.c_proj.bias", "h.1.attn")};
  EXPECT_EQ(assess(predicting(""), by_verdict).predicted, std::nullopt);
  EXPECT_EQ(assess(predicting("h.*.bias"), by_verdict).predicted, true);
  EXPECT_EQ(assess(predicting("h.1.attn"), by_verdict).predicted, true) << "where it starts counts as well";
  EXPECT_EQ(assess(predicting("h.0.*"), by_verdict).predicted, false);
  EXPECT_EQ(assess(predicting("*"), {failing_at("a/expected", "")}).predicted, false) << "no tensor was named";
  EXPECT_EQ(assess(predicting("*"), {made_up_result("a/expected")}).predicted, false) << "nothing caught it";
  EXPECT_EQ(
      assess(predicting("h.0.*"), {failing_at("a/expected", "h.1.ln_1.bias"), failing_at("a/expected/2", "h.0.x")}).predicted,
      false)
      << "the case that is reported is the one that is judged";
}

TEST(PitfallReport, CountsAWrongPredictionAsNotFullyCaught) {
  const PitfallOutcome right = assess(predicting("h.*"), {failing_at("a/expected", "h.1.ln_1.bias")});
  const PitfallOutcome wrong = assess(predicting("h.0.*"), {failing_at("a/expected", "h.1.ln_1.bias", "h.1.ln_1")});

  EXPECT_TRUE(all_caught({right}));
  EXPECT_TRUE(wrong.caught);
  EXPECT_FALSE(all_caught({right, wrong}));
  EXPECT_EQ(mutation_score({right, wrong}), "2 of 2 caught, 1 of them not as predicted");
  const std::string text = render({right, wrong}, TableStyle::plain);
  EXPECT_TRUE(has(text, "\tstarts at\tpredicted\n"));
  EXPECT_TRUE(has(text, "\th.1.ln_1.bias\ta/expected\t-\tyes\n"));
  EXPECT_TRUE(has(text, "\th.1.ln_1.bias\ta/expected\th.1.ln_1\tno\n"));
  EXPECT_TRUE(has(text,
                  "not as predicted: verdict_of_rank_zero + last_rank_gradient_scaled: the first bad tensor should be h.0.*, but "
                  "is h.1.ln_1.bias, starting at h.1.ln_1\n"));
  const Json document = Json::parse(to_json(std::vector<PitfallOutcome>{right, wrong}));
  EXPECT_EQ(document["pitfalls"][0]["predicted"], true);
  EXPECT_EQ(document["pitfalls"][1]["predicted"], false);
  EXPECT_EQ(document["pitfalls"][1]["predicted_tensor"], "h.0.*");
  EXPECT_EQ(document["pitfalls"][1]["starts_at"], "h.1.ln_1");
  EXPECT_EQ(document["summary"]["caught"], 2);
  EXPECT_EQ(document["summary"]["fully_caught"], 1);
}

TEST(PitfallReport, DemandsThatDegenerateConfigurationsPass) {
  const PitfallInfo info = predicting("", {"a/expected/data1"});
  const CaseResult caught = failing_at("a/expected/data2", "wte.weight");

  const PitfallOutcome shown = assess(info, {made_up_result("a/expected/data1"), caught});
  EXPECT_EQ(shown.predicted, true);
  EXPECT_EQ(shown.cases_caught, 1);
  EXPECT_TRUE(all_caught({shown}));

  const PitfallOutcome revealed = assess(info, {made_up_result("a/expected/data1", Status::invalid), caught});
  EXPECT_EQ(revealed.predicted, false);
  EXPECT_EQ(revealed.case_name, "a/expected/data2") << "what must pass is no catcher";
  EXPECT_TRUE(has(revealed.broken_prediction, "a/expected/data1 should pass with it on, but: invalid"));
  EXPECT_FALSE(all_caught({revealed}));

  EXPECT_EQ(assess(info, {made_up_result("a/expected/data1", Status::skip), caught}).predicted, false) << "a skip shows nothing";
  EXPECT_EQ(assess(info, {caught}).predicted, false);

  const PitfallOutcome only_revealed =
      assess(info, {failing_at("a/expected/data1", "wte.weight"), made_up_result("a/expected/data2")});
  EXPECT_FALSE(only_revealed.caught);
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

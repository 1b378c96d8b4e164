// SPDX-License-Identifier: Apache-2.0
#include "harness/result_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "harness/made_up_results.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
using tandem::testing::has;
using tandem::testing::made_up_file;
using tandem::testing::made_up_result;

ResultFile some_file() {
  return made_up_file({made_up_result("a/good"), made_up_result("a/bad", Status::fail), made_up_result("b/odd", Status::invalid),
                       made_up_result("b/away", Status::skip)});
}

std::string text_of_reading(const std::string& text) {
  try {
    (void)result_file_from_json(text, "r.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

std::string text_of_reading(const Json& document) { return text_of_reading(document.dump()); }

TEST(ResultFile, HasTheTopLevelThatScriptsDependOn) {
  const Json document = Json::parse(to_json(some_file()));
  std::vector<std::string> keys;
  for (const auto& [key, value] : document.items()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"schema_version", "environment", "cases", "summary"}));
  EXPECT_EQ(document["summary"], Json::parse(R"({"passed": 1, "failed": 1, "skipped": 1, "invalid": 1})"));
  const Json& good = document["cases"][0];
  EXPECT_EQ(good["case"], "a/good");
  EXPECT_EQ(good["status"], "pass");
  EXPECT_EQ(good["plan"]["data"], 4);
  EXPECT_EQ(good["equivalence"]["criterion"], "rounding");
  EXPECT_EQ(good["measurements"]["step_seconds"]["samples"].size(), 5U);
  EXPECT_EQ(good["measurements"]["peak_bytes"]["workspace"], 600);
  EXPECT_EQ(good["predictions"]["peak_bytes"].size(), 3U);
  EXPECT_TRUE(document["cases"][1]["measurements"].is_null()) << "no number without a pass";
}

TEST(ResultFile, KeepsBothErrorsAndTheBoundOfEveryStage) {
  const Json document = Json::parse(to_json(some_file()));
  const Json& stages = document["cases"][0]["equivalence"]["stages"];
  ASSERT_EQ(stages.size(), 6U);
  EXPECT_EQ(stages[1]["stage"], "gradients");
  EXPECT_GT(stages[1]["error"], 0);
  EXPECT_GT(stages[1]["yardstick_error"], 0);
  EXPECT_DOUBLE_EQ(stages[1]["bound"],
                   4 * std::max(stages[1]["floor"].get<double>(), stages[1]["yardstick_error"].get<double>()));
}

TEST(ResultFile, ReadsBackWhatItWrote) {
  const ResultFile written = some_file();
  const ResultFile read = result_file_from_json(to_json(written), "r.json");

  EXPECT_TRUE(to_json(read) == to_json(written));
  EXPECT_EQ(read.cases[0].verdict.tensors_judged, 12);
  EXPECT_EQ(read.environment.seed, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(read.environment.libraries.at("fmt"), "9.1.0");
  ASSERT_EQ(read.cases.size(), 4U);
  EXPECT_EQ(read.cases[0].plan, written.cases[0].plan);
  EXPECT_EQ(read.cases[0].model, written.cases[0].model);
  EXPECT_EQ(read.cases[0].measurements->step_seconds.samples, written.cases[0].measurements->step_seconds.samples);
  EXPECT_EQ(read.cases[1].verdict.first_bad_tensor, "h.1.mlp.c_fc.weight");
  EXPECT_EQ(read.cases[1].verdict.first_bad_step, 2);
}

TEST(ResultFile, SaysWhichPitfallsWereOn) {
  RunContext context;
  context.pitfalls = PitfallSet(std::array{Pitfall::bound_widened});
  ResultFile file;
  file.environment = collect_environment(context, {});
  EXPECT_EQ(Json::parse(to_json(file))["environment"]["pitfalls"], Json::parse(R"(["bound_widened"])"));
}

TEST(ResultFile, SaysOfWhatTheWorldWasMade) {
  RunContext context;
  context.world.link.emplace();
  context.world.link->name = "pcie-25gbe";
  context.world.link->dilation = 10;
  context.world.algorithm = CollectiveAlgorithm::ring;
  context.world.adversary = AdversaryScript{.seed = 3};
  ResultFile file;
  file.environment = collect_environment(context, {});

  const Environment read = result_file_from_json(to_json(file), "r.json").environment;

  EXPECT_EQ(read.transport, "threads");
  EXPECT_EQ(read.link, "pcie-25gbe dilated 10 x");
  EXPECT_EQ(read.algorithm, "ring");
  EXPECT_EQ(read.version, file.environment.version);
  EXPECT_EQ(read.adversary, "3");
}

TEST(ResultFile, ReadsFilesThatDoNotNameAnAlgorithm) {
  Json document = Json::parse(to_json(some_file()));
  document["environment"].erase("algorithm");
  document["environment"].erase("version");
  document["environment"].erase("adversary");

  const Environment read = result_file_from_json(document.dump(), "r.json").environment;

  EXPECT_EQ(read.algorithm, "direct");
  EXPECT_EQ(read.version, "");
  EXPECT_EQ(read.adversary, "none");
}

TEST(ResultFile, WritesNumbersThatAreNotFiniteAsNull) {
  ResultFile file = made_up_file({made_up_result("a/b", Status::fail)});
  file.cases[0].verdict.error = std::nan("");
  file.cases[0].verdict.error_over_bound = std::numeric_limits<double>::infinity();
  file.cases[0].verdict.properties.push_back({"p", std::nan(""), Relation::at_most, 1, "d", -1, ""});

  const Json document = Json::parse(to_json(file));

  EXPECT_TRUE(document["cases"][0]["equivalence"]["error"].is_null());
  EXPECT_TRUE(document["cases"][0]["equivalence"]["error_over_bound"].is_null());
  EXPECT_TRUE(document["cases"][0]["properties"][0]["value"].is_null());
  EXPECT_EQ(document["cases"][0]["properties"][0]["holds"], false);
  EXPECT_EQ(text_of_reading(to_json(file)), "no error");
}

TEST(ResultFile, KeepsTheWorstPropertyOfACaseWithoutTensors) {
  CaseEvidence evidence;
  evidence.properties = {{"gap", 0.01, Relation::at_most, 0.03, "d", -1, ""}, {"floor", 0.5, Relation::at_least, 0, "d", -1, ""}};
  ResultFile file = made_up_file({made_up_result("a/b")});
  file.cases[0].verdict = judge(Criterion::convergence, evidence, {});

  const Json equivalence = Json::parse(to_json(file))["cases"][0]["equivalence"];
  EXPECT_EQ(equivalence["error"], 0.01);
  EXPECT_EQ(equivalence["bound"], 0.03);
  EXPECT_EQ(equivalence["worst_tensor"], "gap");
  EXPECT_TRUE(to_json(result_file_from_json(to_json(file), "r.json")) == to_json(file));
}

TEST(ResultFile, SaysWhereAFailureStarts) {
  ResultFile file = some_file();
  file.cases[1].localisation = Localisation{"d.logits", -1, "head", "backward", 2, "whole", 1, 0.5, 0, HUGE_VAL};
  file.cases[2].localisation_problem = "no trace";

  const Json document = Json::parse(to_json(file));

  EXPECT_TRUE(document["cases"][0]["equivalence"]["localisation"].is_null());
  const Json& found = document["cases"][1]["equivalence"]["localisation"];
  EXPECT_EQ(found["tensor"], "d.logits");
  EXPECT_TRUE(found["layer"].is_null());
  EXPECT_EQ(found["phase"], "backward");
  EXPECT_EQ(found["rank"], 2);
  EXPECT_EQ(found["micro_batch"], 1);
  EXPECT_EQ(document["cases"][2]["equivalence"]["localisation_problem"], "no trace");
  const ResultFile read = result_file_from_json(to_json(file), "r.json");
  EXPECT_TRUE(to_json(read) == to_json(file));
  ASSERT_TRUE(read.cases[1].localisation.has_value());
  EXPECT_EQ(read.cases[1].localisation->operation, "head");
  EXPECT_EQ(read.cases[1].localisation->layer, -1);
  EXPECT_TRUE(std::isinf(read.cases[1].localisation->error_over_bound));
  EXPECT_FALSE(read.cases[0].localisation.has_value());
}

TEST(ResultFile, ReadsFilesThatKnowNoLocalisation) {
  Json old = Json::parse(to_json(some_file()));
  for (Json& entry : old["cases"]) {
    if (entry["equivalence"].is_object()) {
      entry["equivalence"].erase("localisation");
      entry["equivalence"].erase("localisation_problem");
    }
  }
  EXPECT_EQ(text_of_reading(old), "no error");
}

TEST(ResultFile, SurvivesReasonsThatAreNotUtf8) {
  ResultFile file = made_up_file({made_up_result("a/b", Status::fail)});
  file.cases[0].verdict.reason = "the file says \xff\xfe";
  EXPECT_EQ(text_of_reading(to_json(file)), "no error");
}

TEST(ResultFile, NamesFileAndFieldOfWhatIsWrong) {
  const Json good = Json::parse(to_json(some_file()));
  Json bad = good;
  bad["cases"][2]["status"] = "passed";
  EXPECT_TRUE(has(text_of_reading(bad), "r.json is not a result file: /cases/2/status is not one of the allowed values"));

  bad = good;
  bad["cases"][1].erase("equivalence");
  EXPECT_TRUE(has(text_of_reading(bad), "/cases/1/equivalence is missing"));

  bad = good;
  bad.erase("summary");
  EXPECT_TRUE(has(text_of_reading(bad), "/summary is missing"));

  bad = good;
  bad["environment"]["cores"] = "two";
  EXPECT_TRUE(has(text_of_reading(bad), "/environment/cores has the wrong type"));

  bad = good;
  bad["cases"][0]["measurements"]["step_seconds"]["samples"][1] = -0.5;
  EXPECT_TRUE(has(text_of_reading(bad), "/cases/0/measurements/step_seconds/samples/1 is too small"));

  bad = good;
  bad["cases"][0]["plan"]["data"] = 0;
  EXPECT_TRUE(has(text_of_reading(bad), "plan.data is 0 in r.json at /cases/0"));

  bad = good;
  bad["more"] = 1;
  EXPECT_TRUE(has(text_of_reading(bad), "unknown key"));

  bad = good;
  bad["summary"]["passed"] = 3;
  EXPECT_TRUE(has(text_of_reading(bad), "/summary/passed is 3, but the cases say 1"));

  bad = good;
  bad["cases"][1]["case"] = "a/good";
  EXPECT_TRUE(has(text_of_reading(bad), "/cases/1/case is a/good, which appears twice"));

  bad = good;
  bad["schema_version"] = 2;
  EXPECT_TRUE(has(text_of_reading(bad), "/schema_version is 2; this program reads version 1"));
}

TEST(ResultFile, RefusesWhatIsNoJson) {
  const std::string text = to_json(some_file());
  EXPECT_TRUE(has(text_of_reading(text.substr(0, text.size() / 2)), "r.json is not valid JSON: error in line"));
  EXPECT_TRUE(has(text_of_reading(std::string()), "r.json is empty; was the run that should write it cut off?"));
  EXPECT_TRUE(has(text_of_reading(std::string("[]")), "r.json is not a result file: / has the wrong type"));
}

TEST(ResultFile, EveryTruncationIsRefused) {
  const std::string text = to_json(some_file());
  for (std::size_t length = 0; length + 2 < text.size(); length += 97)
    EXPECT_NE(text_of_reading(text.substr(0, length)), "no error");
}

TEST(ResultFile, IsWrittenWholeAndReadFromDisk) {
  const auto path = std::filesystem::temp_directory_path() / ("tandem_result_" + std::to_string(getpid()) + ".json");
  write_result_file(path, some_file());
  EXPECT_EQ(read_result_file(path).cases.size(), 4U);
  std::filesystem::remove(path);

  EXPECT_THROW((void)read_result_file(path), InputError);
  EXPECT_THROW(write_result_file("/nonexistent/folder/r.json", some_file()), IoError);
}

TEST(Environment, DescribesThisMachineAndThisBuild) {
  const Environment environment = collect_environment({}, {});
  EXPECT_GE(environment.cores, 1);
  EXPECT_GE(environment.usable_cores, 1);
  EXPECT_GT(environment.memory_bytes, 0);
  EXPECT_EQ(environment.date.size(), std::string("2024-05-31T12:00:00Z").size());
  EXPECT_FALSE(environment.cpu.empty() || environment.git_commit.empty() || environment.compiler.empty());
  EXPECT_TRUE(describe_build().starts_with("tandem " + environment.version + " (")) << describe_build();
  EXPECT_FALSE(environment.version.empty());
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "core/plan.h"

#include <functional>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

TEST(Plan, DefaultIsLegal) {
  EXPECT_TRUE(conflicts(TrainingPlan{}, GptConfig{}).empty());
  EXPECT_NO_THROW(require_legal(TrainingPlan{}, GptConfig{}));
}

TEST(Plan, DataParallelismTakesAnyNumberOfRanks) {
  TrainingPlan plan;
  plan.batch.rows = 3;
  for (const int ranks : {1, 2, 3, 4, 7}) {
    plan.parallel.data = ranks;
    EXPECT_TRUE(conflicts(plan, GptConfig{}).empty()) << ranks;
  }
}

TEST(Plan, WorldIsTheProductOfTheDegrees) {
  const ParallelDegrees degrees{.data = 2, .tensor = 3, .pipeline = 4, .context = 5, .expert = 2};
  EXPECT_EQ(degrees.world_size(), 120);
}

TEST(Plan, NamesTheOptionAtFault) {
  struct Broken {
    std::string option;
    std::function<void(TrainingPlan&)> damage;
  };
  const std::vector<Broken> cases = {
      {"data", [](TrainingPlan& p) { p.parallel.data = 0; }},
      {"tensor", [](TrainingPlan& p) { p.parallel.tensor = 2; }},
      {"pipeline", [](TrainingPlan& p) { p.parallel.pipeline = 0; }},
      {"context", [](TrainingPlan& p) { p.parallel.context = 2; }},
      {"expert", [](TrainingPlan& p) { p.parallel.expert = -1; }},
      {"rows", [](TrainingPlan& p) { p.batch.rows = 0; }},
      {"micro_batches", [](TrainingPlan& p) { p.batch.micro_batches = 0; }},
      {"bucket_bytes", [](TrainingPlan& p) { p.buckets.bucket_bytes = -1; }},
      {"schedule", [](TrainingPlan& p) { p.schedule = "1f1b"; }},
      {"recompute", [](TrainingPlan& p) { p.recompute = "full"; }},
      {"zero", [](TrainingPlan& p) { p.zero_stage = 1; }},
      {"threads_per_rank", [](TrainingPlan& p) { p.threads_per_rank = 0; }},
  };
  for (const Broken& broken : cases) {
    TrainingPlan plan;
    broken.damage(plan);
    const std::vector<Conflict> found = conflicts(plan, GptConfig{});
    ASSERT_EQ(found.size(), 1U) << broken.option;
    EXPECT_EQ(found.front().option, broken.option);
    EXPECT_NE(found.front().reason.find(broken.option), std::string::npos) << found.front().reason;
  }
}

TEST(Plan, ReportsEveryConflictInOneLine) {
  TrainingPlan plan;
  plan.parallel.tensor = 2;
  plan.zero_stage = 3;
  const GptConfig model{.hidden = 64, .heads = 5};
  try {
    require_legal(plan, model);
    FAIL() << "no error";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("heads 5 do not divide hidden 64"), std::string::npos) << text;
    EXPECT_NE(text.find("tensor = 2 is not implemented"), std::string::npos) << text;
    EXPECT_NE(text.find("zero = 3 is not implemented"), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "harness/agreement.h"

#include <gtest/gtest.h>

#include <vector>

#include "harness/made_up_results.h"

namespace tandem {
namespace {

using tandem::testing::made_up_result;

TEST(Agreement, LeavesWhatAllSayAsItIs) {
  CaseResult result = made_up_result("a/b");
  const std::vector<Opinion> opinions(3, opinion_of(result));

  take_worst(result, opinions);

  EXPECT_EQ(result.verdict.status, Status::pass);
  EXPECT_TRUE(result.verdict.reason.empty());
  EXPECT_TRUE(result.measurements);
}

TEST(Agreement, OneThatFailsIsEnough) {
  CaseResult result = made_up_result("a/b");
  const std::vector<Opinion> opinions = {opinion_of(result),
                                         {Status::invalid, "liveness", "nothing moved"},
                                         {Status::fail, "gradients", "too far"},
                                         {Status::fail, "losses", "further"}};

  take_worst(result, opinions);

  EXPECT_EQ(result.verdict.status, Status::fail);
  EXPECT_EQ(result.verdict.check, "gradients");
  EXPECT_EQ(result.verdict.reason, "process 2: too far");
  EXPECT_FALSE(result.measurements);
}

TEST(Agreement, APassOfThisProcessDoesNotStandAgainstASkip) {
  CaseResult result = made_up_result("a/b");
  const std::vector<Opinion> opinions = {{Status::skip, "unavailable", "no text"}, opinion_of(result)};

  take_worst(result, opinions);

  EXPECT_EQ(result.verdict.status, Status::skip);
  EXPECT_EQ(result.verdict.reason, "process 0: no text");
}

TEST(Agreement, AllProcessesComeToTheSame) {
  const CaseResult passed = made_up_result("a/b");
  const CaseResult failed = made_up_result("a/b", Status::fail);
  const std::vector<Opinion> opinions = {opinion_of(passed), opinion_of(failed)};

  for (CaseResult result : {passed, failed}) {
    take_worst(result, opinions);
    EXPECT_EQ(result.verdict.status, Status::fail);
    EXPECT_EQ(result.verdict.reason, "process 1: " + failed.verdict.reason);
  }
}

}  // namespace
}  // namespace tandem

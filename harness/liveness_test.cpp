// SPDX-License-Identifier: Apache-2.0
#include "harness/liveness.h"

#include <gtest/gtest.h>

#include "harness/made_up_case.h"
#include "harness/verdict.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::MadeUpCase;

Verdict rounding(const CaseEvidence& evidence) { return judge(Criterion::rounding, evidence, {}); }

TEST(Liveness, IsInvalidWhereBothSidesAreFrozen) {
  MadeUpCase made;
  for (auto* side : {&made.evidence.truth, &made.evidence.yardstick, &made.evidence.candidate}) {
    for (const char* tensor : {"weight", "bias", "key.bias"}) {
      MadeUpCase::values(*side, "adamw_parameters", tensor) = MadeUpCase::values(*side, "initial_parameters", tensor);
    }
  }

  const Verdict verdict = rounding(made.evidence);

  EXPECT_EQ(verdict.status, Status::invalid);
  EXPECT_EQ(verdict.check, "liveness");
  EXPECT_TRUE(has(verdict.reason, "no parameter moved in stage adamw_parameters"));
}

TEST(Liveness, IsInvalidWhereGradientsAreZeroOrLossesStandStill) {
  MadeUpCase zero;
  for (auto* side : {&zero.evidence.truth, &zero.evidence.yardstick, &zero.evidence.candidate}) {
    for (const char* tensor : {"weight", "bias", "key.bias"}) {
      for (double& value : MadeUpCase::values(*side, "gradients", tensor)) value = 0;
    }
  }
  EXPECT_TRUE(has(rounding(zero.evidence).reason, "gradients of step 0 are zero"));
  EXPECT_EQ(rounding(zero.evidence).status, Status::invalid);

  MadeUpCase still;
  still.evidence.candidate->losses.assign(4, 10.37);
  const Verdict verdict = rounding(still.evidence);
  EXPECT_EQ(verdict.status, Status::invalid);
  EXPECT_TRUE(has(verdict.reason, "10.37 in all 4 steps"));
}

TEST(Liveness, IsInvalidWhereAllRanksHadTheSameInputs) {
  MadeUpCase same(3);
  same.evidence.candidate->input_hashes = {5, 5, 5};
  EXPECT_EQ(rounding(same.evidence).status, Status::invalid);
  same.evidence.candidate->input_hashes = {5, 0, 5};
  EXPECT_EQ(rounding(same.evidence).status, Status::invalid);
  same.evidence.candidate->input_hashes = {5, 0, 0};
  EXPECT_EQ(rounding(same.evidence).status, Status::invalid);
  same.evidence.candidate->input_hashes = {5, 6};
  EXPECT_EQ(rounding(same.evidence).status, Status::invalid);
  same.evidence.candidate->input_hashes = {5, 6, 0};
  EXPECT_EQ(rounding(same.evidence).status, Status::pass);
}

TEST(Liveness, CountsARankGroupThatSharesItsInputOnce) {
  const auto with_parts = [](int ranks, std::vector<std::uint64_t> hashes) {
    MadeUpCase made(ranks);
    made.evidence.candidate->input_hashes = std::move(hashes);
    return rounding(made.evidence);
  };
  EXPECT_EQ(with_parts(4, {5}).status, Status::pass) << "tensor 4: one part of the batch";
  EXPECT_EQ(with_parts(4, {5, 6}).status, Status::pass) << "data 2, tensor 2";
  EXPECT_EQ(with_parts(4, {5, 5}).status, Status::invalid);
  EXPECT_TRUE(has(with_parts(4, {5, 5}).reason, "all 2 parts of the batch had the same inputs"));
  EXPECT_EQ(with_parts(4, {0}).status, Status::invalid) << "nobody had rows";
  EXPECT_EQ(with_parts(4, {5, 0}).status, Status::invalid);
  EXPECT_EQ(with_parts(4, {}).status, Status::invalid);
  EXPECT_EQ(with_parts(4, {5, 6, 7}).status, Status::invalid) << "3 parts cannot be dealt to 4 ranks";
  EXPECT_EQ(with_parts(2, {5, 6, 7, 8}).status, Status::invalid);
}

TEST(Liveness, IsInvalidWithoutInitialParameters) {
  MadeUpCase made;
  for (auto* side : {&made.evidence.truth, &made.evidence.yardstick, &made.evidence.candidate}) {
    (*side)->stages.erase((*side)->stages.begin());
  }
  const Verdict verdict = rounding(made.evidence);
  EXPECT_EQ(verdict.status, Status::invalid);
  EXPECT_TRUE(has(verdict.reason, "whether anything moved cannot be told"));
}

}  // namespace
}  // namespace tandem

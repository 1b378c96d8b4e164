// SPDX-License-Identifier: Apache-2.0
#include "harness/verdict.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "harness/made_up_case.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::kFp32Roundoff;
using tandem::testing::kFp64Roundoff;
using tandem::testing::made_up_twins;
using tandem::testing::MadeUpCase;

Verdict rounding(const CaseEvidence& evidence) { return judge(Criterion::rounding, evidence, {}); }

const TensorVerdict* find(const Verdict& verdict, const std::string& stage, const std::string& tensor) {
  for (const TensorVerdict& candidate : verdict.tensors) {
    if (candidate.stage == stage && candidate.tensor == tensor) return &candidate;
  }
  return nullptr;
}

TEST(Judge, PassesWhatDiffersByRoundingAlone) {
  for (const int ranks : {1, 2, 7}) {
    const Verdict verdict = rounding(MadeUpCase(ranks).evidence);

    EXPECT_EQ(verdict.status, Status::pass) << verdict.reason;
    EXPECT_EQ(verdict.reason, "");
    EXPECT_EQ(verdict.ranks_judged, ranks);
    EXPECT_GT(verdict.error_over_bound, 0);
    EXPECT_LT(verdict.error_over_bound, 1);
    EXPECT_FALSE(verdict.worst_tensor.empty());
    EXPECT_FALSE(verdict.first_bad_tensor.has_value());
  }
}

TEST(Judge, BoundIsFourTimesTheYardstickOrTheFloor) {
  MadeUpCase made;
  Verdict verdict = rounding(made.evidence);
  const TensorVerdict quiet = *find(verdict, "gradients", "weight");
  EXPECT_DOUBLE_EQ(quiet.floor, kFp32Roundoff * std::sqrt(64.0));
  EXPECT_DOUBLE_EQ(quiet.bound, 4 * quiet.floor);

  for (double& value : MadeUpCase::values(made.evidence.yardstick, "gradients", "weight")) value *= 1 + 1e-5;
  verdict = rounding(made.evidence);
  const TensorVerdict noisy = *find(verdict, "gradients", "weight");
  EXPECT_NEAR(noisy.yardstick_error, 1e-5, 1e-7);
  EXPECT_DOUBLE_EQ(noisy.bound, 4 * noisy.yardstick_error);
}

TEST(Judge, FailsAtTheFirstTensorInExecutionOrderBeyondItsBound) {
  MadeUpCase made;
  for (double& value : MadeUpCase::values(made.evidence.candidate, "adamw_parameters", "weight")) value *= 1 + 1e-3;
  MadeUpCase::values(made.evidence.candidate, "gradients", "bias")[3] += 1e-5;

  const Verdict verdict = rounding(made.evidence);

  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_EQ(verdict.check, "gradients");
  EXPECT_EQ(verdict.first_bad_tensor, "bias");
  EXPECT_EQ(verdict.first_bad_step, 0);
  EXPECT_EQ(verdict.worst_tensor, "weight");
  EXPECT_EQ(verdict.worst_stage, "adamw_parameters");
  EXPECT_EQ(find(verdict, "gradients", "bias")->worst_index, 3);
}

TEST(Judge, NamesTheStepAtWhichLossesPart) {
  MadeUpCase made;
  MadeUpCase::values(made.evidence.candidate, "losses", "loss")[2] += 1e-4;

  const Verdict verdict = rounding(made.evidence);

  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_EQ(verdict.check, "losses");
  EXPECT_EQ(verdict.first_bad_step, 2);
}

TEST(Judge, JudgesATrueZeroAbsolutelyAndOnlyAsAGradient) {
  MadeUpCase made;
  const Verdict verdict = rounding(made.evidence);
  const TensorVerdict* key = find(verdict, "gradients", "key.bias");
  ASSERT_NE(key, nullptr);
  EXPECT_TRUE(key->absolute);
  double squares = 0;
  for (const EvidenceTensor& tensor : made.evidence.truth->stages[1].tensors) {
    for (const double value : tensor.values) squares += value * value;
  }
  EXPECT_DOUBLE_EQ(key->floor, kFp32Roundoff * 8 * std::sqrt(10.0 / 60.0) * std::sqrt(squares));
  EXPECT_NE(find(verdict, "initial_parameters", "key.bias"), nullptr);
  EXPECT_EQ(find(verdict, "sgd_parameters", "key.bias"), nullptr);
  EXPECT_EQ(find(verdict, "adamw_parameters", "key.bias"), nullptr);

  for (double& value : MadeUpCase::values(made.evidence.candidate, "gradients", "key.bias")) value = 1e-3;
  EXPECT_EQ(rounding(made.evidence).first_bad_tensor, "key.bias");
}

TEST(Judge, JudgesAnIdleTensorAbsolutely) {
  MadeUpCase made;
  for (auto* side : {&made.evidence.truth, &made.evidence.yardstick, &made.evidence.candidate}) {
    for (double& value : MadeUpCase::values(*side, "gradients", "bias")) value = 0;
  }
  MadeUpCase::values(made.evidence.candidate, "gradients", "bias")[0] = 1e-9;
  const Verdict verdict = rounding(made.evidence);
  EXPECT_EQ(verdict.status, Status::pass) << verdict.reason;
  EXPECT_TRUE(find(verdict, "gradients", "bias")->absolute);

  MadeUpCase::values(made.evidence.candidate, "gradients", "bias")[0] = 1e-6;
  EXPECT_EQ(rounding(made.evidence).status, Status::fail);
}

TEST(Judge, FailsWhereATensorOrStageIsMissingOrExtra) {
  MadeUpCase missing_tensor;
  missing_tensor.evidence.candidate->stages[1].tensors.erase(missing_tensor.evidence.candidate->stages[1].tensors.begin());
  Verdict verdict = rounding(missing_tensor.evidence);
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_EQ(verdict.check, "evidence");
  EXPECT_EQ(verdict.first_bad_tensor, "weight");

  MadeUpCase missing_stage;
  missing_stage.evidence.candidate->stages.erase(missing_stage.evidence.candidate->stages.begin() + 2);
  verdict = rounding(missing_stage.evidence);
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_TRUE(has(verdict.reason, "no stage sgd_parameters"));

  MadeUpCase extra_tensor;
  extra_tensor.evidence.candidate->stages[1].tensors.push_back({"extra", {1.0}, 1, false});
  verdict = rounding(extra_tensor.evidence);
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_TRUE(has(verdict.reason, "extra"));

  MadeUpCase extra_stage;
  extra_stage.evidence.candidate->stages.push_back({"more", 3, {{"x", {1.0}, 1, false}}});
  verdict = rounding(extra_stage.evidence);
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_TRUE(has(verdict.reason, "stage more"));

  MadeUpCase other_size;
  MadeUpCase::values(other_size.evidence.candidate, "gradients", "bias").pop_back();
  verdict = rounding(other_size.evidence);
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_TRUE(has(verdict.reason, "9 elements of bias"));
}

TEST(Judge, FailsWhatWasNeverWritten) {
  for (const double poison : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    MadeUpCase made;
    MadeUpCase::values(made.evidence.candidate, "sgd_parameters", "bias")[7] = poison;

    const Verdict verdict = rounding(made.evidence);

    EXPECT_EQ(verdict.status, Status::fail);
    EXPECT_EQ(verdict.check, "finite");
    EXPECT_EQ(verdict.first_bad_tensor, "bias");
    EXPECT_TRUE(has(verdict.reason, "never written or is not finite (element 7"));
  }
}

TEST(Judge, FailsWhereReplicasDiffer) {
  MadeUpCase made(4);
  made.evidence.candidate->replica_hashes[3] = 43;

  const Verdict verdict = rounding(made.evidence);

  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_EQ(verdict.check, "replica_hashes");
  EXPECT_TRUE(has(verdict.reason, "rank 3"));
}

TEST(Judge, IsInvalidWithoutTheReplicasOfAllRanks) {
  MadeUpCase made(4);
  made.evidence.candidate->replica_hashes.pop_back();
  EXPECT_EQ(rounding(made.evidence).status, Status::invalid);
}

TEST(Judge, FailsWhereAPropertyDoesNotHoldAndWhereItIsNaN) {
  MadeUpCase made;
  made.evidence.properties.push_back({"bytes", 100, Relation::at_most, 100, "2 b (n - 1) / n", -1, ""});
  EXPECT_EQ(rounding(made.evidence).status, Status::pass);

  made.evidence.properties.push_back({"share", std::nan(""), Relation::at_least, 0, "a share", 2, "h.0"});
  const Verdict verdict = rounding(made.evidence);
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_EQ(verdict.check, "property share");
  EXPECT_EQ(verdict.first_bad_step, 2);
  EXPECT_EQ(verdict.first_bad_tensor, "h.0");
}

TEST(Property, HoldsByItsRelation) {
  const auto holds = [](double value, Relation relation) { return Property{"p", value, relation, 1.0, "", -1, ""}.holds(); };
  EXPECT_TRUE(holds(1, Relation::at_most) && holds(1, Relation::at_least) && holds(1, Relation::equal));
  EXPECT_TRUE(holds(0, Relation::at_most) && holds(2, Relation::at_least));
  EXPECT_FALSE(holds(2, Relation::at_most) || holds(0, Relation::at_least) || holds(std::nextafter(1, 2), Relation::equal));
  for (const Relation relation : {Relation::at_most, Relation::at_least, Relation::equal})
    EXPECT_FALSE(holds(std::nan(""), relation));
}

TEST(Judge, CountsBeyondOneExactlyWhereAPropertyFails) {
  for (const Relation relation : {Relation::at_most, Relation::at_least}) {
    for (const double limit : {-2.0, 0.0, 2.0}) {
      for (const double value : {-3.0, -1.0, -0.5, 0.5, 1.0, 3.0}) {
        CaseEvidence evidence;
        evidence.properties.push_back({"p", value, relation, limit, "", -1, ""});
        const Verdict verdict = judge(Criterion::convergence, evidence, {});
        EXPECT_EQ(verdict.error_over_bound > 1, verdict.status == Status::fail) << value << symbol(relation) << limit;
      }
    }
  }
}

TEST(Judge, IsInvalidWhereTwoSidesAreTheSame) {
  MadeUpCase made;
  made.evidence.candidate->side = made.evidence.yardstick->side;
  const Verdict verdict = rounding(made.evidence);
  EXPECT_EQ(verdict.status, Status::invalid);
  EXPECT_EQ(verdict.check, "sides");

  CaseEvidence twins = made_up_twins();
  twins.truth->side = twins.candidate->side;
  EXPECT_EQ(judge(Criterion::bitwise, twins, {}).status, Status::invalid);
}

TEST(Judge, IsInvalidWhereASideIsMissingOrInTheWrongPrecision) {
  MadeUpCase no_yardstick;
  no_yardstick.evidence.yardstick.reset();
  EXPECT_EQ(rounding(no_yardstick.evidence).status, Status::invalid);

  MadeUpCase no_candidate;
  no_candidate.evidence.candidate.reset();
  EXPECT_EQ(rounding(no_candidate.evidence).status, Status::invalid);

  MadeUpCase coarse_yardstick;
  coarse_yardstick.evidence.yardstick->unit_roundoff = 0x1p-8;
  EXPECT_EQ(rounding(coarse_yardstick.evidence).status, Status::invalid);

  MadeUpCase coarse_truth;
  coarse_truth.evidence.truth->unit_roundoff = 0x1p-8;
  EXPECT_EQ(rounding(coarse_truth.evidence).status, Status::invalid);

  EXPECT_EQ(rounding(CaseEvidence{}).status, Status::invalid);
  EXPECT_EQ(judge(Criterion::bitwise, CaseEvidence{}, {}).status, Status::invalid);
  EXPECT_EQ(judge(Criterion::convergence, CaseEvidence{}, {}).status, Status::invalid);
}

TEST(Judge, NeedsNoYardstickInTheTruthsOwnPrecision) {
  MadeUpCase made(1, 0x1p-54);
  made.evidence.candidate->unit_roundoff = kFp64Roundoff;
  made.evidence.yardstick.reset();
  for (double& value : MadeUpCase::values(made.evidence.candidate, "gradients", "key.bias")) value = 0;

  const Verdict verdict = rounding(made.evidence);

  EXPECT_EQ(verdict.status, Status::pass) << verdict.reason;
}

TEST(JudgeBitwise, PassesEqualBitsAndFailsOneBit) {
  CaseEvidence twins = made_up_twins(3);
  const Verdict equal = judge(Criterion::bitwise, twins, {});
  EXPECT_EQ(equal.status, Status::pass) << equal.reason;
  EXPECT_EQ(equal.error_over_bound, 0);
  EXPECT_NE(find(equal, "adamw_parameters", "key.bias"), nullptr) << "twins must agree even where the true value is zero";

  double& bit = MadeUpCase::values(twins.candidate, "adamw_parameters", "weight")[11];
  bit = std::nextafter(bit, 10);
  const Verdict verdict = judge(Criterion::bitwise, twins, {});
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_EQ(verdict.first_bad_tensor, "weight");
  EXPECT_EQ(verdict.first_bad_step, 3);
  EXPECT_EQ(find(verdict, "adamw_parameters", "weight")->worst_index, 11);
  EXPECT_TRUE(std::isinf(verdict.error_over_bound));
}

TEST(JudgeBitwise, TellsMinusZeroFromZero) {
  CaseEvidence twins = made_up_twins();
  MadeUpCase::values(twins.truth, "gradients", "bias")[0] = 0.0;
  MadeUpCase::values(twins.candidate, "gradients", "bias")[0] = -0.0;
  EXPECT_EQ(judge(Criterion::bitwise, twins, {}).status, Status::fail);
}

TEST(Judge, ComparesInitialParametersBitForBit) {
  MadeUpCase made;
  double& value = MadeUpCase::values(made.evidence.candidate, "initial_parameters", "weight")[0];
  value = std::nextafter(value, 1);
  const Verdict verdict = rounding(made.evidence);
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_EQ(verdict.check, "initial_parameters");
}

TEST(JudgeConvergence, JudgesPropertiesAndTheHealthOfGivenSides) {
  CaseEvidence evidence;
  evidence.properties.push_back({"gap", 0.01, Relation::at_most, 0.03, "stated", -1, ""});
  EXPECT_EQ(judge(Criterion::convergence, evidence, {}).status, Status::pass);

  evidence.candidate = MadeUpCase(2).evidence.candidate;
  EXPECT_EQ(judge(Criterion::convergence, evidence, {}).status, Status::pass);
  evidence.candidate->losses = {3.0, 3.0};
  EXPECT_EQ(judge(Criterion::convergence, evidence, {}).status, Status::invalid);
  evidence.candidate->losses = {3.0, std::nan("")};
  EXPECT_EQ(judge(Criterion::convergence, evidence, {}).status, Status::fail);
}

}  // namespace
}  // namespace tandem

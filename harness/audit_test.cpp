// SPDX-License-Identifier: Apache-2.0
#include "harness/audit.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "harness/made_up_case.h"
#include "harness/verdict.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::made_up_twins;
using tandem::testing::MadeUpCase;

PitfallSet only(Pitfall pitfall) { return PitfallSet(std::array{pitfall}); }

Verdict rounding(const CaseEvidence& evidence, const PitfallSet& pitfalls = {}) {
  return judge(Criterion::rounding, evidence, pitfalls);
}

// A healthy verdict and what it was made from, to be tampered with.
struct Audited {
  MadeUpCase made{4};
  Verdict verdict = rounding(made.evidence);
  /// What the audit finds; with status pass where it finds nothing.
  [[nodiscard]] Finding operator()() const {
    return audit(verdict, sides_of(Criterion::rounding, made.evidence)).value_or(Finding{Status::pass, "", "", -1, ""});
  }
};

TEST(Audit, FindsNothingInAHealthyVerdict) { EXPECT_EQ(Audited()().status, Status::pass); }

TEST(Audit, FindsOneWidenedBoundAndNamesATensorBeyondTheDerivedOne) {
  Audited audited;
  TensorVerdict& tensor = audited.verdict.tensors[4];
  tensor.bound *= 1.01;
  EXPECT_EQ(audited().status, Status::invalid);
  EXPECT_EQ(audited().tensor, "");

  tensor.error = 2 * tensor.bound;
  tensor.bound *= 3;
  EXPECT_EQ(audited().tensor, tensor.tensor);
}

TEST(Audit, DerivesTheFloorAnew) {
  Audited audited;
  TensorVerdict& tensor = audited.verdict.tensors[4];
  tensor.floor *= 10;
  tensor.bound = 4 * tensor.floor;
  EXPECT_TRUE(has(audited().reason, "can be derived"));
}

TEST(Audit, FindsALooseBoundWhereBitsMustBeEqual) {
  Audited audited;
  audited.verdict.tensors[0].bitwise = false;
  audited.verdict.tensors[0].bound = 1e-9;
  EXPECT_TRUE(has(audited().reason, "initial_parameters"));
}

TEST(Audit, CountsTensorsAndRanks) {
  Audited dropped;
  dropped.verdict.tensors.pop_back();
  EXPECT_TRUE(has(dropped().reason, "11 of 12 tensors were judged"));

  Audited one_rank;
  one_rank.verdict.ranks_judged = 1;
  EXPECT_TRUE(has(one_rank().reason, "1 of 4 ranks were judged"));
}

// Faults of the harness come in pairs with one of a technique: the pair must still not be green.
TEST(HarnessFault, WidenedBoundDoesNotPassAThreePerMilleError) {
  MadeUpCase made;
  for (double& value : MadeUpCase::values(made.evidence.candidate, "gradients", "weight")) value *= 1.003;
  EXPECT_EQ(rounding(made.evidence).status, Status::fail);

  const Verdict verdict = rounding(made.evidence, only(Pitfall::bound_widened));

  EXPECT_NE(verdict.status, Status::pass);
  EXPECT_EQ(verdict.check, "audit");
  EXPECT_EQ(verdict.first_bad_tensor, "weight");
  for (const TensorVerdict& tensor : verdict.tensors)
    EXPECT_TRUE(tensor.holds()) << "the wide bound itself must let the error through";
}

TEST(HarnessFault, WidenedBoundDoesNotPassAlone) {
  EXPECT_EQ(rounding(MadeUpCase().evidence, only(Pitfall::bound_widened)).status, Status::invalid);
  EXPECT_EQ(judge(Criterion::bitwise, made_up_twins(), only(Pitfall::bound_widened)).status, Status::invalid);
}

TEST(HarnessFault, VerdictOfRankZeroDoesNotPassABadLastRank) {
  MadeUpCase made(4);
  made.evidence.candidate->replica_hashes[3] = 43;

  const Verdict verdict = rounding(made.evidence, only(Pitfall::verdict_of_rank_zero));

  EXPECT_EQ(verdict.status, Status::invalid);
  EXPECT_EQ(verdict.check, "audit");
  EXPECT_EQ(verdict.ranks_judged, 1);
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "harness/replicas.h"

#include <gtest/gtest.h>

#include <array>

#include "harness/made_up_case.h"
#include "harness/verdict.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::MadeUpCase;

Verdict rounding(const CaseEvidence& evidence, const PitfallSet& pitfalls = {}) {
  return judge(Criterion::rounding, evidence, pitfalls);
}

// Tensor 2 x data 2: ranks 0, 1 hold the halves of "weight" that ranks 2, 3 hold as well; all hold "bias".
MadeUpCase of_four_ranks() {
  MadeUpCase made(4);
  Evidence& side = *made.evidence.candidate;
  side.replica_hashes.clear();
  side.input_hashes = {1, 2};
  for (int rank = 0; rank < 4; ++rank) {
    for (const char* stage : {"gradients", "adamw_parameters"}) {
      const std::uint64_t offset = stage == std::string("gradients") ? 0 : 100;
      const bool left = rank % 2 == 0;
      side.replicas.push_back({"weight", left ? "[0:20]" : "[20:40]", stage, rank, offset + (left ? 7 : 8)});
      side.replicas.push_back({"bias", "whole", stage, rank, offset + 9});
    }
  }
  return made;
}

ReplicaHash& copy_of(MadeUpCase& made, const std::string& stage, const std::string& tensor, int rank) {
  for (ReplicaHash& copy : made.evidence.candidate->replicas) {
    if (copy.stage == stage && copy.tensor == tensor && copy.rank == rank) return copy;
  }
  throw ContractError("no such copy");
}

TEST(Replicas, MayHoldDifferentPartsOfATensor) {
  const Verdict verdict = rounding(of_four_ranks().evidence);
  EXPECT_EQ(verdict.status, Status::pass) << verdict.reason;
  EXPECT_EQ(verdict.ranks_judged, 4);
}

TEST(Replicas, NameTensorPartStageAndTheOddRank) {
  MadeUpCase made = of_four_ranks();
  copy_of(made, "adamw_parameters", "bias", 2).hash = 1;

  const Verdict verdict = rounding(made.evidence);

  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_EQ(verdict.check, "replica_hashes");
  EXPECT_EQ(verdict.first_bad_tensor, "bias");
  EXPECT_EQ(verdict.first_bad_step, 3) << "the step of the stage adamw_parameters";
  EXPECT_TRUE(has(verdict.reason, "copies of bias (whole) in stage adamw_parameters differ"));
  EXPECT_TRUE(has(verdict.reason, "rank 2 does not hold what rank 0, 1, 3 holds"));
}

TEST(Replicas, NameTheFirstStageEvenWhereAnEarlierRankIsOddLater) {
  MadeUpCase made = of_four_ranks();
  copy_of(made, "adamw_parameters", "bias", 0).hash = 1;
  copy_of(made, "gradients", "weight", 3).hash = 2;

  const Verdict verdict = rounding(made.evidence);

  EXPECT_EQ(verdict.first_bad_tensor, "weight");
  EXPECT_TRUE(has(verdict.reason, "weight ([20:40]) in stage gradients differ: rank 3 does not hold what rank 1 holds"));
}

TEST(Replicas, AreComparedWithinOneRankToo) {
  MadeUpCase made = of_four_ranks();
  made.evidence.candidate->replicas.push_back({"bias", "whole", "gradients", 3, 1234});
  const Verdict verdict = rounding(made.evidence);
  EXPECT_EQ(verdict.status, Status::fail);
  EXPECT_TRUE(has(verdict.reason, "rank 3 does not hold"));
}

TEST(Replicas, AreJudgedWholeAndByPartWhereBothAreGiven) {
  MadeUpCase whole = of_four_ranks();
  whole.evidence.candidate->replica_hashes = {1, 1, 1, 2};
  EXPECT_EQ(rounding(whole.evidence).status, Status::fail);
  MadeUpCase part = of_four_ranks();
  part.evidence.candidate->replica_hashes = {1, 1, 1, 1};
  EXPECT_EQ(rounding(part.evidence).status, Status::pass);
  copy_of(part, "gradients", "bias", 1).hash = 0;
  EXPECT_EQ(rounding(part.evidence).status, Status::fail);
}

TEST(Replicas, AreInvalidWithoutEveryRank) {
  MadeUpCase none = of_four_ranks();
  none.evidence.candidate->replicas.clear();
  EXPECT_EQ(rounding(none.evidence).status, Status::invalid);

  MadeUpCase one_missing = of_four_ranks();
  std::erase_if(one_missing.evidence.candidate->replicas, [](const ReplicaHash& copy) { return copy.rank == 1; });
  EXPECT_EQ(rounding(one_missing.evidence).status, Status::invalid);
  EXPECT_TRUE(has(rounding(one_missing.evidence).reason, "of 3 of its 4 ranks"));

  MadeUpCase stranger = of_four_ranks();
  stranger.evidence.candidate->replicas.push_back({"bias", "whole", "gradients", 4, 9});
  EXPECT_EQ(rounding(stranger.evidence).status, Status::invalid);

  MadeUpCase short_list = of_four_ranks();
  short_list.evidence.candidate->replica_hashes = {1, 1, 1};
  EXPECT_EQ(rounding(short_list.evidence).status, Status::invalid);
}

TEST(HarnessFault, VerdictOfRankZeroDoesNotPassABadCopyOfAPart) {
  MadeUpCase made = of_four_ranks();
  copy_of(made, "gradients", "weight", 2).hash = 1;
  EXPECT_EQ(rounding(made.evidence).status, Status::fail);
  const PitfallSet blind(std::array{Pitfall::verdict_of_rank_zero});
  EXPECT_FALSE(check_replicas(*made.evidence.candidate, blind).finding.has_value()) << "the check itself must be blind";

  const Verdict verdict = rounding(made.evidence, blind);

  EXPECT_EQ(verdict.status, Status::invalid);
  EXPECT_EQ(verdict.check, "audit");
  EXPECT_EQ(verdict.ranks_judged, 1);
}

}  // namespace
}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "core/fault_script.h"

#include <set>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

std::string error_of(const std::string& text) {
  try {
    (void)parse_fault(text);
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(FaultScript, ReadsWhatIsWrittenAndNothingElseMoves) {
  Fault expected;
  expected.kind = FaultKind::nan;
  expected.step = 20;
  expected.rank = 1;
  expected.target = FaultTarget::activations;
  EXPECT_EQ(parse_fault("nan@step=20,rank=1,target=activations"), expected);

  expected = {};
  expected.kind = FaultKind::kill;
  expected.step = 7;
  EXPECT_EQ(parse_fault("kill@step=7"), expected);
  expected.moment = FaultMoment::save;
  EXPECT_EQ(parse_fault("kill@during=save,step=7"), expected);

  expected = {};
  expected.kind = FaultKind::jitter;
  expected.step = 3;
  expected.rank = 2;
  expected.milliseconds = 2.5;
  expected.count = 9;
  EXPECT_EQ(parse_fault("jitter@step=3,rank=2,ms=2.5,count=9"), expected);

  expected = {};
  expected.kind = FaultKind::spike;
  expected.step = 4;
  expected.factor = 1e3;
  EXPECT_EQ(parse_fault("spike@step=4,factor=1e3"), expected);

  expected = {};
  expected.kind = FaultKind::poison;
  expected.step = 0;
  expected.batch = 12;
  EXPECT_EQ(parse_fault("poison@batch=12"), expected);
}

TEST(FaultScript, NumbersFaultsInTheirOrder) {
  const std::vector<std::string> texts = {"hang@step=2", "kill@step=1", "kill@step=1"};

  const std::vector<Fault> faults = parse_faults(texts);

  ASSERT_EQ(faults.size(), 3U);
  for (std::size_t i = 0; i < faults.size(); ++i) EXPECT_EQ(faults[i].id, i);
  EXPECT_EQ(faults[0].kind, FaultKind::hang);
}

TEST(FaultScript, EveryKindIsDescribedAndReadsBackAsItIsWritten) {
  const std::vector<std::string> lines = describe_fault_kinds();
  ASSERT_EQ(lines.size(), all_fault_kinds().size());
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const FaultKind kind = all_fault_kinds()[i];
    EXPECT_TRUE(lines[i].starts_with(std::string(name(kind)) + " ")) << lines[i];
    EXPECT_TRUE(names.insert(name(kind)).second) << name(kind);

    Fault fault = parse_fault(std::string(name(kind)) + (kind == FaultKind::poison ? "@batch=3" : "@step=3"));
    EXPECT_EQ(parse_fault(to_string(fault)), fault) << to_string(fault);
  }
  EXPECT_EQ(names.size(), 15U);
  for (const char* text : {"nan@step=20,rank=1,target=weights", "kill@step=7,rank=3,during=restore", "slow@step=1,ms=0.1,count=4",
                           "spike@step=2,factor=1e+300,count=3", "poison@batch=9"}) {
    EXPECT_EQ(to_string(parse_fault(text)), text);
  }
}

TEST(FaultScript, NamesWhatIsWrong) {
  EXPECT_EQ(
      error_of("nam@step=2"),
      "fault 'nam@step=2': there is no kind 'nam' (did you mean 'nan'?); there are kill, lose, hang, slow, nan, flip, spike, "
      "poison, disk_full, corrupt, message, heartbeat, jitter, supervisor, preempt");
  EXPECT_EQ(error_of("nan@stp=2"),
            "fault 'nan@stp=2': there is no key 'stp' (did you mean 'step'?); there are step, rank, target");
  EXPECT_EQ(error_of("kill@step=2,ms=3"), "fault 'kill@step=2,ms=3': 'ms' means nothing for kill; it takes step, rank, during");
  EXPECT_EQ(
      error_of("nan@step=2,target=weight"),
      "fault 'nan@step=2,target=weight': there is no target 'weight' (did you mean 'weights'?); there are weights, moments, "
      "activations, gradients");
  EXPECT_EQ(error_of("kill"), "fault 'kill': it does not say when; write kill@step=N");
  EXPECT_EQ(error_of("poison"), "fault 'poison': it does not say when; write poison@batch=N");
}

TEST(FaultScript, RefusesWhatIsNoScript) {
  for (const char* text : {"",
                           "@",
                           "kill@",
                           "kill@step",
                           "kill@step=",
                           "kill@step=0",
                           "kill@step=-1",
                           "kill@step=1.5",
                           "kill@step=1x",
                           "kill@step=99999999999999999999",
                           "kill@step=1,",
                           "kill@step=1,,rank=0",
                           "kill@step=1,step=1",
                           "kill@step=1,rank=-1",
                           "kill@step=1,rank=4294967296",
                           "kill@ step=1",
                           "slow@step=1,ms=0",
                           "slow@step=1,ms=inf",
                           "slow@step=1,ms=nan",
                           "slow@step=1,count=0",
                           "spike@step=1,factor=-2",
                           "poison@step=1",
                           "poison@batch=-1",
                           "poison@batch=1,step=1",
                           "KILL@step=1",
                           "kill@step=1@step=2",
                           "kill@step=1,during=never"}) {
    EXPECT_TRUE(error_of(text).starts_with("fault '")) << text << ": " << error_of(text);
  }
}

}  // namespace
}  // namespace tandem

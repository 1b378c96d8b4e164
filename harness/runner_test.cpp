// SPDX-License-Identifier: Apache-2.0
#include "harness/runner.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "core/error.h"
#include "harness/made_up_case.h"
#include "harness/registry.h"

namespace tandem {
namespace {

using tandem::testing::has;
using tandem::testing::MadeUpCase;

Case named(const std::string& name, bool quick = true) {
  Case made;
  made.suite = name.substr(0, name.find('/'));
  made.name = name;
  made.quick = quick;
  made.execute = [](const RunContext&) { return MadeUpCase().evidence; };
  return made;
}

CaseList some_cases() {
  return {named("data_parallel/ranks1/fp32"), named("data_parallel/ranks16/fp32"), named("data_parallel/ranks4/fp32", false),
          named("training/synthetic")};
}

std::vector<std::string> selected(const std::vector<std::string>& patterns, Tier tier = Tier::full) {
  std::vector<std::string> names;
  for (const Case& entry : select_cases(some_cases(), patterns, tier)) names.push_back(entry.name);
  return names;
}

std::string text_of_selecting(const std::vector<std::string>& patterns, Tier tier = Tier::full) {
  try {
    (void)selected(patterns, tier);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Registry, SelectsSuitesCasesAndBeginnings) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(selected({}).size(), 4U);
  EXPECT_EQ(selected({"training"}), Names{"training/synthetic"});
  EXPECT_EQ(selected({"data_parallel/ranks1"}), Names{"data_parallel/ranks1/fp32"}) << "ranks16 is another part";
  EXPECT_EQ(selected({"data_parallel/ranks1/fp32"}), Names{"data_parallel/ranks1/fp32"});
  EXPECT_EQ(selected({"data_parallel/"}).size(), 3U);
  EXPECT_EQ(selected({"data_parallel/r"}).size(), 3U) << "no whole part: any beginning";
  EXPECT_EQ(selected({"training", "data_parallel/ranks1", "training/synthetic"}),
            (Names{"data_parallel/ranks1/fp32", "training/synthetic"}))
      << "in the order of the list, each once";
}

TEST(Registry, TakesStarsForAnything) {
  EXPECT_EQ(selected({"data_parallel/*"}).size(), 3U);
  EXPECT_EQ(selected({"*/ranks1*/fp32"}).size(), 2U);
  EXPECT_EQ(selected({"data_parallel/*4"}), std::vector<std::string>{"data_parallel/ranks4/fp32"}) << "whole parts up to a slash";
  EXPECT_TRUE(has(text_of_selecting({"tensor_parallel/*"}), "no suite or case is called 'tensor_parallel/*'"));
}

TEST(Registry, QuickLeavesOutTheOthers) {
  EXPECT_EQ(selected({"data_parallel"}, Tier::quick).size(), 2U);
  EXPECT_TRUE(has(text_of_selecting({"data_parallel/ranks4"}, Tier::quick), "use --full"));
}

TEST(Registry, RefusesUnknownNamesWithTheNearest) {
  EXPECT_TRUE(has(text_of_selecting({"trianing"}), "did you mean 'training'?"));
  EXPECT_TRUE(has(text_of_selecting({"data_parallel/ranks1/fp3x"}), "did you mean 'data_parallel/ranks1/fp32'?"));
  EXPECT_TRUE(has(text_of_selecting({"data_parallel/nothing/like/that/at/all"}), "suite 'data_parallel' has no case"));
  EXPECT_TRUE(has(text_of_selecting({"zzz"}), "the suites are: data_parallel, training"));
  EXPECT_TRUE(has(text_of_selecting({"training", ""}), "no suite or case is called ''"));
}

TEST(Registry, RefusesCasesWithoutAnIdentity) {
  EXPECT_NO_THROW(check_registry(some_cases()));
  EXPECT_THROW(check_registry({named("a/b"), named("a/b")}), ContractError);
  Case stray = named("a/b");
  stray.suite = "b";
  EXPECT_THROW(check_registry({stray}), ContractError);
  Case idle = named("a/b");
  idle.execute = nullptr;
  EXPECT_THROW(check_registry({idle}), ContractError);
}

TEST(Runner, GoesOnAfterACaseThatThrows) {
  CaseList cases = some_cases();
  cases[0].execute = [](const RunContext&) -> CaseEvidence { throw InputError("the file x is missing"); };
  cases[1].execute = [](const RunContext&) -> CaseEvidence { throw 7; };  // NOLINT(hicpp-exception-baseclass)

  const RunOutcome outcome = run_cases(cases, {});

  ASSERT_EQ(outcome.results.size(), 4U);
  EXPECT_FALSE(outcome.interrupted);
  EXPECT_EQ(outcome.results[0].verdict.status, Status::fail);
  EXPECT_EQ(outcome.results[0].verdict.check, "exception");
  EXPECT_EQ(outcome.results[0].verdict.reason, "the file x is missing");
  EXPECT_EQ(outcome.results[1].verdict.status, Status::fail);
  EXPECT_EQ(outcome.results[2].verdict.status, Status::pass);
  EXPECT_EQ(count(outcome.results).failed, 2);
  EXPECT_FALSE(count(outcome.results).good());
}

TEST(Runner, SkipsWhatIsUnavailableWithTheReason) {
  Case entry = named("a/b");
  entry.unavailable = [](const RunContext& context) -> std::optional<std::string> {
    return context.backend == "cuda" ? std::nullopt : std::optional<std::string>("needs a GPU");
  };
  entry.execute = [](const RunContext&) -> CaseEvidence { throw std::logic_error("was executed"); };

  const CaseResult result = run_case(entry, {});

  EXPECT_EQ(result.verdict.status, Status::skip);
  EXPECT_EQ(result.verdict.reason, "needs a GPU");
  EXPECT_TRUE(count({result}).good());
}

TEST(Runner, StopsBetweenCasesWhenInterruptedAndKeepsWhatIsDone) {
  std::atomic<bool> interrupted = false;
  CaseList cases = some_cases();
  cases[1].execute = [&](const RunContext&) {
    interrupted = true;
    return MadeUpCase().evidence;
  };
  RunnerOptions options;
  options.interrupted = &interrupted;

  const RunOutcome outcome = run_cases(cases, options);

  EXPECT_TRUE(outcome.interrupted);
  ASSERT_EQ(outcome.results.size(), 2U);
  EXPECT_EQ(outcome.results[1].verdict.status, Status::pass);
}

TEST(Runner, ReportsProgressBeforeEachCaseAndAtTheEnd) {
  std::vector<std::string> seen;
  std::size_t results = 0;
  RunnerOptions options;
  options.on_progress = [&](const RunProgress& progress) {
    EXPECT_EQ(progress.index, seen.size());
    EXPECT_EQ(progress.total, 4U);
    seen.push_back(progress.name);
  };
  options.on_result = [&](const CaseResult&) { ++results; };

  (void)run_cases(some_cases(), options);

  EXPECT_EQ(seen.size(), 5U);
  EXPECT_EQ(seen.front(), "data_parallel/ranks1/fp32");
  EXPECT_EQ(seen.back(), "");
  EXPECT_EQ(results, 4U);
}

Measured steady_run() {
  Measured measured;
  measured.step_seconds = {0.1, 0.1, 0.1};
  measured.wall_seconds = 0.3;
  measured.tokens_per_step = 10;
  measured.spans_by_rank.resize(2);
  return measured;
}

TEST(Runner, GivesNoNumbersWithoutAPass) {
  Case good = named("a/good");
  good.execute = [](const RunContext&) {
    CaseEvidence evidence = MadeUpCase().evidence;
    evidence.measured = steady_run();
    return evidence;
  };
  Case bad = named("a/bad");
  bad.execute = [](const RunContext&) {
    CaseEvidence evidence = MadeUpCase().evidence;
    evidence.measured = steady_run();
    evidence.properties.push_back({"never", 1, Relation::equal, 2, "", -1, ""});
    return evidence;
  };
  RunnerOptions options;
  options.keep_spans = true;

  const CaseResult of_good = run_case(good, options);
  ASSERT_TRUE(of_good.measurements.has_value());
  EXPECT_DOUBLE_EQ(of_good.measurements->tokens_per_second, 100);
  EXPECT_EQ(of_good.spans_by_rank.size(), 2U);
  EXPECT_FALSE(run_case(bad, options).measurements.has_value());
}

TEST(Runner, BlamesABusyMachineForTimesOnly) {
  Case entry = named("a/b");
  entry.timed = true;
  entry.execute = [](const RunContext&) {
    CaseEvidence evidence = MadeUpCase().evidence;
    evidence.properties.push_back({"step_seconds", 3, Relation::at_most, 2, "", -1, ""});
    return evidence;
  };
  RunnerOptions options;
  double seconds = 0;
  options.cpu_seconds_of_others = [&] { return seconds += 1e6; };
  const CaseResult busy = run_case(entry, options);
  EXPECT_EQ(busy.verdict.status, Status::skip);
  EXPECT_TRUE(has(busy.verdict.reason, "the machine is busy: other programs took"));
  EXPECT_TRUE(has(busy.verdict.reason, "step_seconds"));

  options.context.pitfalls = PitfallSet(std::array{Pitfall::gelu_with_erf});
  EXPECT_EQ(run_case(entry, options).verdict.status, Status::fail) << "a planted fault must be caught";
  options.context.pitfalls = {};
  options.context.world.transport = "mpi";
  EXPECT_EQ(run_case(entry, options).verdict.status, Status::fail) << "other ranks are no other programs";
  options.context.world.transport = "threads";
  options.cpu_seconds_of_others = [] { return 7.0; };
  EXPECT_EQ(run_case(entry, options).verdict.status, Status::fail) << "nobody else ran";

  options.cpu_seconds_of_others = [&] { return seconds += 1e6; };
  entry.execute = [](const RunContext&) {
    CaseEvidence evidence = MadeUpCase().evidence;
    for (double& value : MadeUpCase::values(evidence.candidate, "gradients", evidence.candidate->stages[0].tensors[0].name))
      value *= 2;
    return evidence;
  };
  EXPECT_EQ(run_case(entry, options).verdict.status, Status::fail) << "gradients do not depend on what else runs";
  entry.timed = false;
  EXPECT_EQ(run_case(entry, options).verdict.status, Status::fail);
}

TEST(Runner, CountsTheWorkOfOthersOnly) {
  const double before = cpu_seconds_of_others();
  EXPECT_GE(before, 0);
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(60)) {
  }
  EXPECT_GE(cpu_seconds_of_others() - before, -0.03) << "own work is taken off, but for a tick or two";
}

Localisation somewhere() { return {"h.1.attn.c_proj", 1, "attention_out", "forward", 3, "[0:4, 0:8]", 1, 0.021, 6e-7, 3.5e4}; }

TEST(Runner, LocalisesOnceAndOnlyWhatHasFailed) {
  int calls = 0;
  Case entry = named("a/b");
  entry.localise = [&](const RunContext& context) -> std::optional<Localisation> {
    EXPECT_EQ(context.seed, 17U);
    ++calls;
    return somewhere();
  };
  RunnerOptions options;
  options.context.seed = 17;
  EXPECT_FALSE(run_case(entry, options).localisation.has_value());

  entry.unavailable = [](const RunContext&) { return std::optional<std::string>("needs a GPU"); };
  EXPECT_EQ(run_case(entry, options).verdict.status, Status::skip);
  entry.unavailable = nullptr;
  entry.execute = [](const RunContext&) { return CaseEvidence(); };
  EXPECT_EQ(run_case(entry, options).verdict.status, Status::invalid);
  EXPECT_EQ(calls, 0);

  entry.execute = [](const RunContext&) {
    MadeUpCase made;
    MadeUpCase::values(made.evidence.candidate, "gradients", "bias")[3] += 1e-5;
    return made.evidence;
  };
  const CaseResult result = run_case(entry, options);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(result.verdict.status, Status::fail);
  EXPECT_EQ(result.verdict.first_bad_tensor, "bias");
  ASSERT_TRUE(result.localisation.has_value());
  EXPECT_EQ(result.localisation->tensor, "h.1.attn.c_proj");
}

TEST(Runner, KeepsTheVerdictWhenLocalisingThrows) {
  Case entry = named("a/b");
  entry.execute = [](const RunContext&) {
    MadeUpCase made(4);
    made.evidence.candidate->replica_hashes[3] = 43;
    return made.evidence;
  };
  entry.localise = [](const RunContext&) -> std::optional<Localisation> { throw InputError("no trace of rank 3"); };
  const CaseResult result = run_case(entry, {});
  EXPECT_EQ(result.verdict.status, Status::fail);
  EXPECT_EQ(result.verdict.check, "replica_hashes");
  EXPECT_TRUE(has(result.verdict.reason, "rank 3"));
  EXPECT_FALSE(result.localisation.has_value());
  EXPECT_EQ(result.localisation_problem, "no trace of rank 3");

  entry.localise = [](const RunContext&) -> std::optional<Localisation> { throw 7; };  // NOLINT(hicpp-exception-baseclass)
  EXPECT_EQ(run_case(entry, {}).verdict.check, "replica_hashes");
  EXPECT_FALSE(run_case(entry, {}).localisation_problem.empty());
}

TEST(Localisation, ReadsAsOneLine) {
  EXPECT_EQ(
      describe(somewhere()),
      "starts at h.1.attn.c_proj (attention_out, forward), rank 3, micro-batch 1, [0:4, 0:8]: error 0.021 = 3.5e+04 x bound");
  Localisation poisoned = somewhere();
  poisoned.operation.clear();
  poisoned.error = std::nan("");
  poisoned.error_over_bound = HUGE_VAL;
  EXPECT_TRUE(has(describe(poisoned), "h.1.attn.c_proj (forward), rank 3"));
  EXPECT_TRUE(has(describe(poisoned), "error nan beyond bound 6e-07"));
}

TEST(Runner, CallsAMeasurementBeyondPhysicsInvalid) {
  Case entry = named("a/b");
  entry.execute = [](const RunContext&) {
    CaseEvidence evidence = MadeUpCase().evidence;
    evidence.measured = steady_run();
    evidence.measured->model_flops_per_step = 1e12;
    evidence.measured->peak_flops_per_second = 1e12;
    return evidence;
  };
  const CaseResult result = run_case(entry, {});
  EXPECT_EQ(result.verdict.status, Status::invalid);
  EXPECT_EQ(result.verdict.check, "measurement");
  EXPECT_FALSE(result.measurements.has_value());
}

TEST(Runner, KeepsWhatOthersMakeOfACase) {
  RunnerOptions options;
  options.agree = [](CaseResult& result) {
    EXPECT_EQ(result.verdict.status, Status::pass);
    result.verdict.status = Status::fail;
  };

  const RunOutcome outcome = run_cases({named("a/b")}, options);

  EXPECT_EQ(count(outcome.results).failed, 1);
}

TEST(Runner, EndsWhereOthersAreGone) {
  RunnerOptions options;
  int cases = 0;
  options.agree = [&](CaseResult&) {
    ++cases;
    throw PeerError(1, "rank 1 died");
  };

  EXPECT_THROW((void)run_cases({named("a/b"), named("a/c")}, options), PeerError);
  EXPECT_EQ(cases, 1);
}

}  // namespace
}  // namespace tandem

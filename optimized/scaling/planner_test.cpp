// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <tuple>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/scaling/planner_search.h"

namespace tandem {
namespace {

using planner::PlannedLayout;
using planner::Schedule;

constexpr double kGib = 1024.0 * 1024 * 1024;

ClusterSpec small_nodes(double memory_gib) {
  ClusterSpec cluster;
  cluster.name = "small nodes";
  cluster.device = {.name = "device",
                    .peak_flops = {{"bf16", 300e12}},
                    .memory_bytes = memory_gib * kGib,
                    .memory_bytes_per_second = 2e12,
                    .constants = {}};
  cluster.devices_per_node = 4;
  cluster.levels = {{.name = "in", .devices = 4, .bytes_per_second = 2e11, .latency_seconds = 2e-6},
                    {.name = "out", .bytes_per_second = 2e10, .latency_seconds = 5e-6, .efficiency = 0.9, .jitter = 0.002}};
  return cluster;
}

ModelShape gpt(std::int64_t layers, std::int64_t hidden, std::int64_t heads) {
  ModelShape model;
  model.name = "gpt";
  model.layers = layers;
  model.hidden = hidden;
  model.heads = heads;
  model.sequence = 1024;
  return model;
}

PlanQuery query_of(ModelShape model, double memory_gib, int devices, std::int64_t rows) {
  PlanQuery query;
  query.model = std::move(model);
  query.cluster = small_nodes(memory_gib);
  query.devices = devices;
  query.global_batch_rows = rows;
  return query;
}

PlanQuery dense_query() { return query_of(gpt(12, 2048, 12), 6, 16, 32); }

PlanQuery expert_query() {
  ModelShape model = gpt(4, 1024, 8);
  model.experts = 4;
  model.expert_choices = 2;
  model.kv_heads = 2;
  return query_of(model, 2.5, 8, 8);
}

using Degrees = std::tuple<int, int, int, int, int>;
Degrees degrees_of(const TrainingPlan& plan) {
  const ParallelDegrees& at = plan.parallel;
  return {at.tensor, at.pipeline, at.context, at.expert, at.data};
}

// Every combination of numbers up to the number of devices, the illegal ones left out by conflicts() alone.
void for_all_plans(const PlanQuery& asked, const std::function<void(const Workload&)>& visit) {
  const PlanQuery query = planner::completed(asked);
  Workload workload = planner::base_workload(query);
  TrainingPlan& plan = workload.plan;
  const auto legal = [&] { return conflicts(workload).empty(); };
  const auto modes = [&] {
    for (const char* recompute : {"none", "selective", "full"}) {
      for (int bits = 0; bits < 8; ++bits) {
        plan.recompute.mode = recompute;
        plan.zero_stage = bits / 2;
        plan.sequence_parallel = bits % 2 != 0;
        const bool deals = plan.zero_stage == 0 || plan.parallel.data * plan.parallel.context > 1;
        if (deals && legal()) visit(workload);
      }
    }
  };
  const auto schedules = [&] {
    for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-v"}) {
      for (int chunks = 1; chunks <= query.model.layers; ++chunks) {
        plan.pipeline.schedule = schedule;
        plan.pipeline.chunks = chunks;
        if (std::string_view(schedule) == "1f1b" ? chunks == 1 : plan.parallel.pipeline > 1) modes();
      }
    }
  };
  const int most = query.devices;
  for (int tensor = 1; tensor <= most; ++tensor) {
    for (int pipeline = 1; pipeline <= most; ++pipeline) {
      for (int context = 1; context <= most; ++context) {
        for (int expert = 1; expert <= std::max(1, query.model.experts); ++expert) {
          const int shard = tensor * pipeline * context;
          if (shard > most || most % shard != 0 || query.global_batch_rows % (most / shard) != 0) continue;
          if (query.sequence % (2 * context) != 0) continue;
          plan.parallel = {.data = most / shard, .tensor = tensor, .pipeline = pipeline, .context = context, .expert = expert};
          const auto rows = static_cast<int>(query.global_batch_rows / plan.parallel.data);
          for (int micro_batches = 1; micro_batches <= rows; ++micro_batches) {
            plan.batch.micro_batches = micro_batches;
            if (rows % micro_batches == 0) schedules();
          }
        }
      }
    }
  }
}

void expect_what_brute_force_finds(PlanQuery query) {
  query.top = 15;  // so far down that bounds decide
  std::map<Degrees, double> fastest;
  std::int64_t legal = 0, fitting = 0;
  for_all_plans(query, [&](const Workload& workload) {
    ++legal;
    if (!estimate_memory(workload, query.cluster).fits()) return;
    ++fitting;
    const double seconds = simulate(workload, query.cluster).step_seconds;
    const auto [known, is_new] = fastest.try_emplace(degrees_of(workload.plan), seconds);
    known->second = std::min(known->second, seconds);
  });
  std::vector<std::pair<double, Degrees>> expected;
  for (const auto& [degrees, seconds] : fastest) expected.emplace_back(seconds, degrees);
  std::sort(expected.begin(), expected.end());
  ASSERT_GT(std::ssize(expected), query.top) << "a question with few answers tests little";
  ASSERT_LT(fitting, legal);

  const PlanReport report = search_plans(query);
  ASSERT_EQ(std::ssize(report.best), query.top);
  EXPECT_EQ(report.candidates, legal);
  EXPECT_LT(report.simulated, fitting);
  for (std::size_t i = 0; i < report.best.size(); ++i) {
    EXPECT_EQ(report.best[i].estimate.step_seconds, expected[i].first) << planner::describe(report.best[i].workload.plan);
    EXPECT_EQ(degrees_of(report.best[i].workload.plan), expected[i].second) << planner::describe(report.best[i].workload.plan);
  }
}

TEST(Planner, FindsWhatBruteForceFinds) { expect_what_brute_force_finds(dense_query()); }

TEST(Planner, FindsWhatBruteForceFindsWithExpertsAndGroupedQueries) { expect_what_brute_force_finds(expert_query()); }

TEST(Planner, BoundsAreNeverAboveTheSimulation) {
  for (const PlanQuery& asked : {dense_query(), expert_query()}) {
    const PlanQuery query = planner::completed(asked);
    const CostModel cost(query.cluster);
    planner::StepBound bound(query, cost);
    Workload workload = planner::base_workload(query);
    double closest = 0;
    for (PlannedLayout layout : planner::all_layouts(query)) {
      const double least = bound.seconds(layout);
      for (int stage = 0; stage < planner::zero_stages(layout); ++stage) {
        layout.zero = static_cast<std::uint8_t>(stage);
        planner::apply(layout, workload);
        const double seconds = simulate(workload, query.cluster).step_seconds;
        ASSERT_LE(least, seconds) << planner::describe(workload.plan);
        closest = std::max(closest, least / seconds);
      }
    }
    EXPECT_GT(closest, 0.9) << "bounds that are far away cut nothing";
  }
}

TEST(Planner, LeavesOutMostOfALargeSpace) {
  ModelShape model = gpt(96, 12288, 96);
  model.sequence = 2048;
  const PlanReport report = search_plans(query_of(model, 80, 1024, 1024));
  EXPECT_GT(report.candidates, 100'000);
  EXPECT_LT(report.simulated, report.candidates / 20);
  ASSERT_EQ(report.best.size(), 5U);
  for (std::size_t i = 1; i < report.best.size(); ++i) {
    EXPECT_GE(report.best[i].estimate.step_seconds, report.best[i - 1].estimate.step_seconds);
    EXPECT_FALSE(report.best[i].why_not.empty());
    EXPECT_TRUE(report.best[i].estimate.memory.fits());
  }
}

TEST(Planner, TakesTheSimplestOfEquallyFastLayouts) {
  // Nothing of a fused attention core is kept, so that recomputing it selectively changes nothing.
  PlanQuery query = dense_query();
  query.cluster = small_nodes(500);
  for (const PlanCandidate& candidate : search_plans(query).best) {
    EXPECT_EQ(candidate.workload.plan.recompute.mode, "none") << planner::describe(candidate.workload.plan);
  }
}

TEST(Planner, SearchesTheSchedulesThatTheSoftwareHas) {
  PlanQuery query = dense_query();
  query.schedules = {"1f1b"};
  query.top = 20;
  for (const PlanCandidate& candidate : search_plans(query).best) {
    EXPECT_EQ(candidate.workload.plan.pipeline.schedule, "1f1b");
    EXPECT_EQ(candidate.workload.plan.pipeline.chunks, 1);
  }
}

TEST(Planner, KeepsToTheLargestDegreesThatAreGiven) {
  PlanQuery query = dense_query();
  query.most = {{"context", 1}, {"tensor", 2}};
  query.top = 50;
  const PlanReport report = search_plans(query);
  EXPECT_GT(report.best.size(), 3U);
  for (const PlanCandidate& candidate : report.best) {
    EXPECT_EQ(candidate.workload.plan.parallel.context, 1);
    EXPECT_LE(candidate.workload.plan.parallel.tensor, 2);
  }
  for (const PlanPath& path : report.paths) EXPECT_LE(path.result.workload.plan.parallel.tensor, 2);
}

TEST(Planner, NamesTheNearestMissWhereNothingFits) {
  PlanQuery query = dense_query();
  query.cluster = small_nodes(0.5);
  double least = 1e30;
  for_all_plans(query,
                [&](const Workload& workload) { least = std::min(least, estimate_memory(workload, query.cluster).total()); });

  const PlanReport report = search_plans(query);

  EXPECT_TRUE(report.best.empty());
  EXPECT_EQ(report.simulated, 0);
  EXPECT_EQ(report.out_of_memory, report.candidates);
  EXPECT_NE(report.nearest_miss.find(fmt::format("needs {:.1f} GiB of 0.5 GiB", least / kGib)), std::string::npos)
      << report.nearest_miss;
  for (const PlanPath& path : report.paths) {
    EXPECT_EQ(path.over_best, 0);
    EXPECT_NE(path.result.why_not.find("does not fit"), std::string::npos) << path.name;
  }
}

TEST(Planner, RefusesWhatIsNotPossibleInWords) {
  const auto refusal = [](PlanQuery query) {
    try {
      static_cast<void>(search_plans(query));
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  PlanQuery query = dense_query();
  query.devices = 6;
  EXPECT_NE(refusal(query).find("no whole number of nodes: small nodes has 4 a node"), std::string::npos) << refusal(query);
  query = dense_query();
  query.schedules = {"zb-h2"};
  EXPECT_NE(refusal(query).find("did you mean zb-h1?"), std::string::npos) << refusal(query);
  query = dense_query();
  query.most = {{"contxt", 1}};
  EXPECT_NE(refusal(query).find("did you mean context?"), std::string::npos) << refusal(query);
  query = dense_query();
  query.cluster.nodes = 1;
  EXPECT_NE(refusal(query).find("more than cluster small nodes has: 4"), std::string::npos) << refusal(query);
  query = query_of(gpt(1, 100, 5), 80, 8, 7);
  query.sequence = 7;
  EXPECT_NE(refusal(query).find("no layout deals 5 heads, 1 layers and 7 rows to 8 devices"), std::string::npos)
      << refusal(query);
}

TEST(Planner, EndsWhenItIsTold) {
  const std::atomic<bool> stop = true;
  PlanQuery query = dense_query();
  query.stop = &stop;
  EXPECT_TRUE(search_plans(query).best.empty());
  query.stop = nullptr;
  EXPECT_FALSE(search_plans(query).best.empty());
}

TEST(Planner, RowsAreNoLongerThanTheTableOfPositions) {
  PlanQuery query = dense_query();
  query.sequence = 2 * query.model.sequence;
  EXPECT_THROW(static_cast<void>(search_plans(query)), InputError);
  query.model.learned_positions = false;
  EXPECT_FALSE(search_plans(query).best.empty());
}

TEST(Planner, RulesOfThumbAreStepsInTheirOrderAndNoBetterThanTheBest) {
  const PlanReport report = search_plans(query_of(gpt(24, 6144, 48), 40, 64, 128));
  ASSERT_EQ(report.paths.size(), 2U);
  const PlanPath& tuning = report.paths[0];
  const PlanPath& simple = report.paths[1];

  EXPECT_EQ(tuning.name, "tuning path");
  EXPECT_NE(tuning.steps.front().choice.find("data 64, zero 1"), std::string::npos) << tuning.steps.front().choice;
  EXPECT_FALSE(tuning.steps.front().memory.fits());
  EXPECT_LE(tuning.result.workload.plan.parallel.tensor, 4) << "the node has 4 devices";
  EXPECT_EQ(simple.name, "simple first");
  EXPECT_NE(simple.steps.front().choice.find("data 64"), std::string::npos) << simple.steps.front().choice;
  EXPECT_EQ(simple.steps[1].rule, "recomputation");
  for (const PlanPath& path : report.paths) {
    EXPECT_TRUE(path.result.estimate.memory.fits()) << path.name;
    EXPECT_TRUE(path.steps.back().memory.fits()) << path.name;
    EXPECT_LT(path.steps.back().memory.total(), path.steps.front().memory.total());
    EXPECT_GE(path.over_best, 1) << path.name;
    EXPECT_EQ(path.result.workload.plan.parallel.world_size(), 64);
  }
}

TEST(Planner, RulesOfThumbShardTheOptimizerAsLongAsTwoRanksHoldTheSame) {
  int with_two = 0;
  for (const int gib : {5, 6, 7, 8, 9, 10}) {
    const PlanReport report = search_plans(query_of(gpt(8, 4096, 32), gib, 8, 16));
    const PlanCandidate& tuned = report.paths.front().result;
    if (!tuned.estimate.memory.fits() || tuned.workload.plan.parallel.data != 2) continue;
    ++with_two;
    EXPECT_EQ(tuned.workload.plan.zero_stage, 1) << gib << " GiB";
  }
  EXPECT_GT(with_two, 0);
}

// What is dealt over one rank is not dealt: nothing is saved, and no such plan is legal.
TEST(Planner, RulesOfThumbShardNothingOverOneRank) {
  int alone = 0;
  for (const double gib : {2.0, 2.5, 3.0, 3.5, 4.0, 5.0}) {
    for (const PlanPath& path : search_plans(query_of(gpt(8, 4096, 32), gib, 8, 16)).paths) {
      const TrainingPlan& plan = path.result.workload.plan;
      if (plan.parallel.data * plan.parallel.context > 1) continue;
      ++alone;
      EXPECT_EQ(plan.zero_stage, 0) << path.name << ", " << gib << " GiB";
    }
  }
  EXPECT_GT(alone, 0);
}

TEST(Planner, ReasonsNameWhatGrewMost) {
  StepEstimate winner;
  winner.step_seconds = 10;
  winner.parts = {.compute = 8, .bubble = 2};
  StepEstimate loser = winner;
  loser.parts.bubble = 2.5;
  loser.parts.tensor = 0.25;
  loser.parts.compute = 7.9;
  EXPECT_EQ(planner::why_slower(loser, winner), "bubble 5.0 points more");
  loser = winner;
  loser.memory.activations = 3 * kGib;
  EXPECT_EQ(planner::why_slower(loser, winner), "as fast, and needs 3.0 GiB more");
}

TEST(Planner, UsualBatchesAreThoseOfPublishedRuns) {
  ModelShape large = gpt(96, 12288, 96);
  EXPECT_EQ(usual_batch_rows(large, 2048), 1536);
  large = gpt(128, 25600, 160);
  EXPECT_EQ(usual_batch_rows(large, 2048), 3072);
  EXPECT_EQ(usual_batch_rows(gpt(12, 768, 12), 1024), 512);
  EXPECT_EQ(usual_batch_rows(gpt(12, 768, 12), 1 << 22), 1);
}

TEST(Planner, TheSmallTwinUsesTheSameTechniques) {
  PlanQuery query = dense_query();
  query.top = 100;
  int with_chunks = 0, with_context = 0;
  for (const PlanCandidate& candidate : search_plans(query).best) {
    const TrainingPlan& large = candidate.workload.plan;
    const TwinRun twin = small_twin_of(candidate, 8);
    const TrainingPlan& small = twin.plan;
    EXPECT_TRUE(conflicts(small, twin.model).empty()) << planner::describe(large);
    EXPECT_LE(small.parallel.world_size(), 8);
    EXPECT_EQ(small.parallel.tensor > 1, large.parallel.tensor > 1) << planner::describe(large);
    EXPECT_EQ(small.parallel.pipeline > 1, large.parallel.pipeline > 1) << planner::describe(large);
    EXPECT_EQ(small.zero_stage, large.zero_stage);
    EXPECT_EQ(small.recompute.mode, large.recompute.mode);
    EXPECT_EQ(small.sequence_parallel, large.sequence_parallel);
    EXPECT_EQ(small.pipeline.effective_schedule(), large.pipeline.effective_schedule());
    EXPECT_LT(num_parameters(twin.model), 2'000'000);
    EXPECT_EQ(small_twin_of(candidate, 1).plan.parallel.world_size(), 1);
    with_chunks += small.pipeline.chunks > 1 ? 1 : 0;
    with_context += small.parallel.context > 1 ? 1 : 0;
  }
  EXPECT_GT(with_chunks, 0);
  EXPECT_GT(with_context, 0);
}

}  // namespace
}  // namespace tandem

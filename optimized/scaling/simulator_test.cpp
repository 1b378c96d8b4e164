// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/simulator.h"

#include <algorithm>
#include <array>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/scaling/simulator_pipeline.h"
#include "optimized/scaling/simulator_test_support.h"
#include "reference/scaling.h"

namespace tandem {
namespace {

PipelineLayout layout_of(const PipelineConfig& config, int ranks) {
  PipelineLayout layout{ranks, config.chunks, config.schedule == "zb-v", {}};
  layout.layers.assign(static_cast<std::size_t>(layout.stages()), {0, 1});
  return layout;
}

PipelineTimes equal_times(int stages) {
  const auto count = static_cast<std::size_t>(stages);
  return {std::vector<double>(count, 1), std::vector<double>(count, 1), std::vector<double>(count, 1),
          std::vector<double>(count - 1, 0)};
}

TEST(SimulatorPipeline, IdlesAsTheClosedFormSaysWithFreeMessages) {
  for (const auto& [schedule, chunks] : {std::pair("gpipe", 1), std::pair("1f1b", 1), std::pair("1f1b", 3)}) {
    for (const int ranks : {2, 4, 8}) {
      for (const int micro_batches : {8, 16, 512}) {
        const PipelineConfig config{schedule, chunks, {}};
        const PipelinePlay play = play_pipeline(config, layout_of(config, ranks), micro_batches, equal_times(ranks * chunks));
        const double work = 3.0 * chunks * micro_batches;
        EXPECT_NEAR(1 - work / play.end(), reference::bubble_share(ranks, micro_batches, chunks), 1e-9)
            << schedule << " " << ranks << " " << micro_batches;
      }
    }
  }
}

TEST(Simulator, SendsOverTheLevelBetweenNeighbouringStages) {
  Workload workload = small_workload(2, 8, 2, 4);
  const auto waiting = [&workload](const char* rank_order) {
    workload.plan.rank_order = rank_order;
    return simulate(workload, ideal_cluster()).parts.pipeline;
  };

  // Stages 16 or 8 ranks apart are in two nodes of eight.
  const double far = waiting("tensor-context-data-pipeline");
  EXPECT_DOUBLE_EQ(waiting("tensor-context-pipeline-data"), far);
  EXPECT_LT(waiting("pipeline-context-tensor-data"), far);
}

TEST(SimulatorPipeline, MessagesDelayWhoNeedsThemAndMayHoldWhoSends) {
  const PipelineConfig config{"1f1b", 1, {}};
  PipelineTimes times = equal_times(2);
  times.hop = {0.25};

  // Forward, hop, forward and backward, hop, backward: one micro-batch.
  const PipelinePlay one = play_pipeline(config, layout_of(config, 2), 1, times);
  EXPECT_NEAR(one.rank_end[0], 1 + 0.25 + 1 + 2 + 0.25 + 2, 1e-12);
  EXPECT_NEAR(one.rank_end[1], 1 + 0.25 + 1 + 2, 1e-12);
  EXPECT_NEAR(one.rank_end_with_free_messages[0], 6, 1e-12);

  // Of gpipe the second forward waits for the first one's message to leave.
  const PipelineConfig all_forward{"gpipe", 1, {}};
  const double free_sender = play_pipeline(all_forward, layout_of(all_forward, 2), 2, times).end();
  times.sender_waits = true;
  EXPECT_NEAR(play_pipeline(all_forward, layout_of(all_forward, 2), 2, times).end(), free_sender + 0.5, 1e-12);
}

TEST(SimulatorPipeline, TwiceTheActivationsOfZeroBubbleFillTheBubble) {
  const PipelineConfig h1{"zb-h1", 1, {}}, twice{"zb-2p", 1, {}};
  const double work = 3.0 * 32;

  const double first = play_pipeline(h1, layout_of(h1, 8), 32, equal_times(8)).end();
  const double second = play_pipeline(twice, layout_of(twice, 8), 32, equal_times(8)).end();

  EXPECT_NEAR(first, work + 7, 1e-9);
  EXPECT_NEAR(second, work, 1e-9);
}

TEST(SimulatorPipeline, AShortPlayContinuedIsTheWholeOne) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> seconds(0.5, 1.5);
  for (const auto& [schedule, chunks] :
       {std::pair("1f1b", 1), std::pair("1f1b", 2), std::pair("1f1b", 4), std::pair("zb-h1", 1)}) {
    for (const int ranks : {2, 3, 4, 8}) {
      for (int trial = 0; trial < 12; ++trial) {
        const PipelineConfig config{schedule, chunks, {}};
        PipelineTimes times = equal_times(ranks * chunks);
        // Every third as models are: equal stages, heavier ends.
        for (std::vector<double>* list : {&times.forward, &times.backward_input, &times.backward_weight}) {
          if (trial % 3 != 0) std::generate(list->begin(), list->end(), [&] { return seconds(random); });
          list->back() += 0.3 * (trial % 3);
        }
        std::fill(times.hop.begin(), times.hop.end(), trial % 2 == 0 ? 0.0 : 0.2 * seconds(random));
        times.sender_waits = trial % 4 == 1;
        const int micro_batches = ranks * (60 + trial);
        const PipelineLayout layout = layout_of(config, ranks);
        const PipelinePlay fast = play_pipeline(config, layout, micro_batches, times);
        const PipelinePlay whole = play_whole_pipeline(config, layout, micro_batches, times);
        for (std::size_t rank = 0; rank < whole.rank_end.size(); ++rank) {
          ASSERT_NEAR(fast.rank_end[rank], whole.rank_end[rank], 1e-12 * whole.end())
              << schedule << " chunks " << chunks << " ranks " << ranks << " trial " << trial;
          ASSERT_NEAR(fast.rank_end_with_free_messages[rank], whole.rank_end_with_free_messages[rank], 1e-12 * whole.end());
        }
        for (std::size_t stage = 0; stage < whole.stage_end.size(); ++stage) {
          ASSERT_NEAR(fast.stage_end[stage], whole.stage_end[stage], 1e-12 * whole.end());
        }
      }
    }
  }
}

std::vector<Workload> assorted_workloads() {
  std::vector<Workload> all = {small_workload(8, 1, 1, 2), small_workload(2, 4, 2, 4), small_workload(4, 2, 4, 8),
                               small_workload(16, 1, 1, 1), small_workload(2, 2, 4, 8)};
  all[1].plan.sequence_parallel = true;
  all[1].software.overlap_tensor = true;
  all[2].plan.zero_stage = 1;
  all[2].plan.recompute.mode = "full";
  all[3].plan.zero_stage = 3;
  all[4].plan.pipeline.chunks = 2;
  all[4].software.overlap_gradients = false;
  return all;
}

TEST(Simulator, PartsAddUpToTheStep) {
  for (const char* name : {"dgx-a100", "small-ethernet"}) {
    const ClusterSpec cluster = read_cluster(name);
    for (const Workload& workload : assorted_workloads()) {
      const StepEstimate estimate = simulate(workload, cluster);
      EXPECT_EQ(estimate.parts.sum(), estimate.step_seconds);
      for (const double part : {estimate.parts.compute, estimate.parts.tensor, estimate.parts.data, estimate.parts.bubble,
                                estimate.parts.pipeline, estimate.parts.optimizer}) {
        EXPECT_GE(part, 0);
      }
      EXPECT_GT(estimate.model_flops_utilization, 0);
      EXPECT_LT(estimate.hardware_flops_utilization, 1);
      EXPECT_FALSE(estimate.bottleneck.empty());
    }
  }
}

TEST(Simulator, MoreBandwidthIsNeverSlower) {
  for (const Workload& workload : assorted_workloads()) {
    ClusterSpec cluster = ideal_cluster();
    double before = std::numeric_limits<double>::infinity();
    for (int doubled = 0; doubled < 5; ++doubled) {
      const double now = simulate(workload, cluster).step_seconds;
      EXPECT_LE(now, before * (1 + 1e-12));
      before = now;
      for (NetworkLevel& level : cluster.levels) level.bytes_per_second *= 2;
    }
  }
}

TEST(Simulator, RecomputationCostsTheLayersForwardOnceMore) {
  const ClusterSpec cluster = ideal_cluster();
  Workload workload = small_workload(1, 1, 1, 2);
  const StepEstimate kept = simulate(workload, cluster);
  workload.plan.recompute.mode = "full";
  const StepEstimate again = simulate(workload, cluster);

  const double layer = (2 * 1024.0 * 12 * 1024 * 1024 + 2 * 1024.0 * 1024 * 1024) / kPeak;
  EXPECT_NEAR(again.parts.recompute, 8 * 2 * layer, 1e-12);
  EXPECT_NEAR(again.step_seconds - kept.step_seconds, again.parts.recompute, 1e-9 * again.step_seconds);
  EXPECT_GT(again.hardware_flops_utilization, again.model_flops_utilization);
  EXPECT_NEAR(kept.hardware_flops_utilization, kept.model_flops_utilization, 1e-15);
}

TEST(Simulator, GradientsHideBehindTheBackwardPass) {
  ClusterSpec cluster = ideal_cluster();
  Workload workload = small_workload(8, 1, 1, 1);
  workload.software.overlap_gradients = false;
  const StepEstimate after = simulate(workload, cluster);
  workload.software.overlap_gradients = true;
  const StepEstimate behind = simulate(workload, cluster);

  EXPECT_LT(behind.parts.data, after.parts.data);
  EXPECT_NEAR(behind.parts.data + behind.hidden_communication_seconds, after.parts.data, 1e-12);
  cluster.device.constants["overlap_interference"] = 0.5;
  const StepEstimate disturbed = simulate(workload, cluster);
  EXPECT_NEAR(disturbed.parts.data, behind.parts.data + 0.5 * behind.hidden_communication_seconds, 1e-12);
  cluster.device.constants["overlap_interference"] = 0;
  cluster.levels.back().jitter = 0.01;
  workload.plan.parallel.data = 32;
  workload.plan.batch.rows = 32;
  const StepEstimate waiting = simulate(workload, cluster);
  cluster.levels.back().jitter = 0;
  EXPECT_NEAR(waiting.step_seconds, simulate(workload, cluster).step_seconds * (1 + 0.01 * 2), 1e-12);  // 4 nodes
}

TEST(Simulator, RanksOfAContextGroupSumTheirGradientsToo) {
  Workload workload = small_workload(4, 1, 1, 1);
  workload.software.overlap_gradients = false;
  const StepEstimate rows_alone = simulate(workload, ideal_cluster());
  workload.plan.parallel.data = workload.plan.parallel.context = 2;
  const StepEstimate halves_of_rows = simulate(workload, ideal_cluster());

  EXPECT_GT(rows_alone.parts.data, 0);
  EXPECT_NEAR(halves_of_rows.parts.data, rows_alone.parts.data, 1e-12);
}

TEST(Simulator, ShardedOptimizerMovesTheSameBytesInTwoHalves) {
  const ClusterSpec cluster = ideal_cluster();
  Workload workload = small_workload(8, 1, 1, 1);
  workload.plan.gradients = "stored";
  workload.software.overlap_gradients = workload.software.overlap_parameters = false;
  const StepEstimate whole = simulate(workload, cluster);
  workload.plan.zero_stage = 1;
  const StepEstimate halves = simulate(workload, cluster);
  EXPECT_NEAR(halves.parts.data, whole.parts.data, 1e-12);

  workload.software.overlap_parameters = true;
  const StepEstimate hidden = simulate(workload, cluster);
  EXPECT_LT(hidden.parts.data, 0.6 * halves.parts.data);
  ClusterSpec disturbed = cluster;
  disturbed.device.constants["overlap_interference"] = 0.5;
  const StepEstimate slower = simulate(workload, disturbed);
  EXPECT_NEAR(slower.parts.data - hidden.parts.data, 0.5 * hidden.hidden_communication_seconds, 1e-12);
}

TEST(Simulator, FaultsAreSeen) {
  const ClusterSpec cluster = ideal_cluster();
  Workload workload = small_workload(8, 2, 4, 8);
  workload.plan.pipeline.chunks = 2;
  workload.plan.recompute.mode = "full";
  workload.software.overlap_gradients = false;
  const StepEstimate right = simulate(workload, cluster);
  const auto with = [&](Pitfall pitfall) { return simulate(workload, cluster, {PitfallSet(std::array{pitfall})}); };

  EXPECT_NEAR(with(Pitfall::communication_counted_twice).hidden_communication_seconds,
              right.hidden_communication_seconds + right.parts.communication(), 1e-12);
  EXPECT_EQ(with(Pitfall::recompute_counted_in_mfu).model_flops_utilization, right.hardware_flops_utilization);
  EXPECT_NEAR(with(Pitfall::bubble_not_scaled_by_chunks).parts.bubble, 2 * right.parts.bubble, 1e-12);
  EXPECT_LT(with(Pitfall::contention_ignored).parts.data, right.parts.data);
}

TEST(Simulator, SixteenThousandDevicesAreAsManyProgramsAsStages) {
  const ClusterSpec cluster = read_cluster("dgx-h100");
  Workload workload;
  workload.model.layers = 128;
  workload.model.hidden = 16384;
  workload.model.heads = 128;
  workload.model.sequence = 8192;
  workload.plan.precision = "bf16";
  workload.plan.parallel = {128, 8, 16, 1, 1};
  workload.plan.batch = {2048, 16};
  workload.plan.sequence_parallel = true;
  workload.plan.zero_stage = 1;

  const StepEstimate estimate = simulate(workload, cluster);

  EXPECT_GT(estimate.model_flops_utilization, 0.15);
  EXPECT_LT(estimate.model_flops_utilization, 0.6);
  EXPECT_LT(estimate.goodput, 1);
  workload.plan.parallel.tensor = 7;
  EXPECT_THROW(static_cast<void>(simulate(workload, cluster)), InputError);
}

}  // namespace
}  // namespace tandem

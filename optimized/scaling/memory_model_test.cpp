// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/memory_model.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/pipeline_parallel/schedule.h"
#include "optimized/scaling/layer_memory.h"
#include "optimized/scaling/published.h"
#include "optimized/zero/ownership.h"

namespace tandem {
namespace {

Workload gpt3(int tensor, int pipeline, int chunks) {
  Workload workload;
  workload.model = read_model_shape("gpt3-175b");
  workload.plan.parallel.tensor = tensor;
  workload.plan.parallel.pipeline = pipeline;
  workload.plan.pipeline.chunks = chunks;
  workload.plan.batch = {64, 64};
  workload.plan.precision = "bf16";
  workload.plan.numerics = numerics_from_precision("bf16");
  workload.software.fused_attention = false;
  return workload;
}

ClusterSpec with_memory(double bytes) {
  ClusterSpec cluster;
  cluster.device.memory_bytes = bytes;
  cluster.device.constants["reserved_bytes"] = 0;  // sources count what their tensors take
  return cluster;
}

TEST(MemoryModel, ALayerKeepsWhatThePublishedTableSays) {
  const double s = 2048, h = 12288, a = 96, b = 2;
  const auto layer = [&](int tensor, bool sequence_parallel, const char* recompute) {
    Workload workload = gpt3(tensor, 8, 1);
    workload.plan.sequence_parallel = sequence_parallel;
    workload.plan.recompute.mode = recompute;
    return activation_bytes_of_layer(workload, b);
  };
  EXPECT_DOUBLE_EQ(layer(1, false, "none"), s * b * h * (34 + 5 * a * s / h));
  EXPECT_DOUBLE_EQ(layer(8, false, "none"), s * b * h * (10 + 24.0 / 8 + 5 * a * s / (h * 8)));
  EXPECT_DOUBLE_EQ(layer(8, true, "none"), s * b * h / 8 * (34 + 5 * a * s / h));
  EXPECT_DOUBLE_EQ(layer(8, false, "selective"), s * b * h * (10 + 24.0 / 8));
  EXPECT_DOUBLE_EQ(layer(8, true, "selective"), s * b * h / 8 * 34);
  EXPECT_DOUBLE_EQ(layer(8, false, "full"), 2 * s * b * h);
  EXPECT_DOUBLE_EQ(layer(8, true, "full"), 2 * s * b * h / 8);
}

TEST(MemoryModel, FusedAttentionKeepsNoProbabilitiesAndRanksShareASequence) {
  Workload workload = gpt3(8, 8, 1);
  workload.plan.recompute.mode = "selective";
  const double selective = activation_bytes_of_layer(workload, 1);
  workload.plan.recompute.mode = "none";
  workload.software.fused_attention = true;
  EXPECT_DOUBLE_EQ(activation_bytes_of_layer(workload, 1), selective + 2048 * 4.0 * 96 / 8);  // log-sum-exp of each head
  workload.plan.parallel.context = 2;
  EXPECT_DOUBLE_EQ(activation_bytes_of_layer(workload, 1), (selective + 2048 * 4.0 * 96 / 8) / 2);
}

TEST(MemoryModel, WhatIsInFlightIsWhatPlayingTheSlotsCounts) {
  for (const auto& [schedule, chunks] :
       {std::pair{"gpipe", 1}, {"1f1b", 1}, {"1f1b", 2}, {"1f1b", 5}, {"zb-h1", 1}, {"zb-v", 2}}) {
    PipelineConfig config;
    config.schedule = schedule;
    config.chunks = chunks;
    for (int ranks = 2; ranks <= 5; ++ranks) {
      for (int micro_batches = ranks; micro_batches <= 4 * ranks; micro_batches += ranks) {
        for (int rank = 0; rank < ranks; ++rank) {
          int now = 0, peak = 0;
          for (const PipelineSlot& slot : pipeline_order(config, ranks, rank, micro_batches)) {
            if (slot.kind == SlotKind::forward) peak = std::max(peak, ++now);
            if (slot.kind == SlotKind::backward || slot.kind == SlotKind::backward_weight) --now;
          }
          EXPECT_EQ(peak_in_flight(config, ranks, rank, micro_batches), peak)
              << schedule << " " << chunks << " " << ranks << " " << rank << " " << micro_batches;
        }
      }
    }
  }
}

TEST(MemoryModel, ModelStateIsThePublishedOneOfEachZeroStage) {
  int checked = 0;
  for (const PublishedRow& row : published_memory_rows("zero")) {
    const double state = estimate_memory(row.workload, with_memory(32e9)).model_state();
    EXPECT_NEAR(state, *row.model_state_bytes, std::max(0.01 * *row.model_state_bytes, row.model_state_rounding)) << row.id;
    ++checked;
  }
  EXPECT_EQ(checked, 36);
}

TEST(MemoryModel, ActivationsAreThePublishedOnes) {
  int shares = 0, bytes = 0;
  for (const PublishedRow& row : published_memory_rows("korthikanti")) {
    if (row.activation_share) {
      Workload baseline = row.workload;
      baseline.plan.sequence_parallel = false;
      baseline.plan.recompute = {};
      const double share = activation_bytes_of_layer(row.workload, 1) / activation_bytes_of_layer(baseline, 1);
      EXPECT_NEAR(share / *row.activation_share, 1, 0.02) << row.id;
      ++shares;
    }
    if (row.activation_bytes) {
      const MemoryEstimate memory = estimate_memory(row.workload, with_memory(80e9));
      EXPECT_NEAR(memory.activations / *row.activation_bytes, 1, 0.03) << row.id;
      EXPECT_NEAR(memory.model_state() / *row.model_state_bytes, 1, 0.04) << row.id;  // the chart leaves out embeddings
      ++bytes;
    }
  }
  EXPECT_EQ(shares, 10);
  EXPECT_EQ(bytes, 4);
}

TEST(MemoryModel, DevicesHoldWhatWasPrintedWherePipelinesWereMeasured) {
  int checked = 0;
  for (const PublishedRow& row : published_memory_rows("zero-bubble")) {
    EXPECT_NEAR(estimate_memory(row.workload, with_memory(80e9)).total() / *row.device_bytes, 1, 0.06) << row.id;
    ++checked;
  }
  EXPECT_EQ(checked, 36);
}

TEST(MemoryModel, MostPublishedRunsFitAndMostThatFailedDoNot) {
  int ran = 0, refused = 0, failed = 0, found = 0;
  for (const PublishedRow& row : published_rows("all")) {
    if (!is_gated(row) || !conflicts(row.workload).empty()) continue;
    ++ran;
    if (!estimate_memory(row.workload, cluster_of(row)).fits()) ++refused;
  }
  for (const PublishedRow& row : published_memory_rows("all")) {
    if (!row.out_of_memory) continue;
    ++failed;
    if (!estimate_memory(row.workload, cluster_of(row)).fits()) ++found;
  }
  EXPECT_GT(ran, 450);
  EXPECT_LT(refused, 0.03 * ran);
  EXPECT_EQ(failed, 4);
  EXPECT_GE(found, 2);
}

// What the engine keeps of a rank's state, tensor by tensor.
double engine_state(const GptConfig& model, const TrainingPlan& plan) {
  const ProcessGrid grid(plan);
  const auto bytes = [](DType dtype) { return static_cast<double>(size_bytes(dtype)); };
  double most = 0;
  for (int rank = 0; rank < grid.size(); ++rank) {
    const std::vector<LocalParameter> parameters = local_parameters(model, plan, grid, rank);
    const Ownership owned = ownership(parameters, plan, grid, rank);
    const auto all = static_cast<double>(owned.units.front().elements.end);
    const auto kept = static_cast<double>(owned.elements);
    const Numerics& numerics = plan.numerics;
    most = std::max(most, bytes(numerics.storage) * (plan.zero_stage >= 3 ? kept : all) +
                              bytes(numerics.accumulate) * (plan.zero_stage >= 2 ? kept : all) +
                              (numerics.has_master_copy() ? 3 : 2) * bytes(numerics.master) * kept);
  }
  return most;
}

TEST(MemoryModel, ModelStateIsWhatTheEngineKeeps) {
  GptConfig model;
  model.vocabulary = 384, model.sequence = 32, model.layers = 6, model.hidden = 48, model.heads = 4;
  int checked = 0;
  for (const char* precision : {"fp32", "bf16"}) {
    for (const auto& [data, tensor, pipeline, zero] : {std::tuple{1, 1, 1, 0},
                                                       {2, 2, 1, 0},
                                                       {1, 2, 3, 0},
                                                       {2, 4, 2, 0},
                                                       {4, 1, 1, 1},
                                                       {2, 2, 2, 1},
                                                       {4, 1, 1, 2},
                                                       {4, 1, 2, 3}}) {
      TrainingPlan plan;
      plan.parallel.data = data, plan.parallel.tensor = tensor, plan.parallel.pipeline = pipeline;
      plan.batch = {8, 2};
      plan.zero_stage = zero;
      plan.precision = precision;
      plan.numerics = numerics_from_precision(precision);
      Workload workload;
      workload.model = shape_of(model);
      workload.plan = plan;
      ASSERT_TRUE(conflicts(workload).empty());
      const double state = estimate_memory(workload, with_memory(1e9)).model_state();
      // Dealt units round to whole elements.
      EXPECT_NEAR(state / engine_state(model, plan), 1, zero == 0 ? 1e-12 : 2e-3)
          << precision << " " << data << tensor << pipeline << zero;
      ++checked;
    }
  }
  EXPECT_EQ(checked, 16);
}

TEST(MemoryModel, TheWorstRankIsFoundAndOneCanBeMistakenForIt) {
  const Workload workload = gpt3(8, 8, 1);
  const ClusterSpec cluster = with_memory(80e9);
  const MemoryEstimate worst = estimate_memory(workload, cluster);
  EXPECT_EQ(worst.worst_pipeline_rank, 0);  // which has eight micro-batches in flight
  const std::vector<Pitfall> planted = {Pitfall::memory_of_last_stage_for_all};
  EXPECT_LT(estimate_memory(workload, cluster, PitfallSet(planted)).total(), 0.8 * worst.total());
  // 12 layers over 8 tensor ranks, the final norm and a copy of the tied table.
  const double last = estimate_memory(workload, cluster, PitfallSet(planted)).parameters / 2;
  EXPECT_NEAR(last / (12 * parameters_of_layer(workload.model) / 8 + 51200 * 12288.0 / 8), 1, 1e-3);
  EXPECT_FALSE(estimate_memory(workload, with_memory(worst.total() - 1)).fits());
  EXPECT_TRUE(estimate_memory(workload, with_memory(worst.total())).fits());
}

TEST(MemoryModel, WhatASoftwareDoesChangesWhatItIsAbout) {
  const ClusterSpec cluster = with_memory(80e9);
  Workload base = gpt3(8, 1, 1);
  base.plan.batch = {2, 1};
  base.software.fused_attention = true;
  const MemoryEstimate plain = estimate_memory(base, cluster);
  const double elements = plain.parameters / 2;
  const auto with = [&](const auto& change) {
    Workload changed = base;
    change(changed);
    return estimate_memory(changed, cluster);
  };
  EXPECT_DOUBLE_EQ(with([](Workload& w) { w.software.host_offload_share = 0.25; }).activations, 0.75 * plain.activations);
  EXPECT_DOUBLE_EQ(with([](Workload& w) { w.software.extra_bytes_per_parameter = 2; }).gradients, plain.gradients + 2 * elements);
  EXPECT_DOUBLE_EQ(with([](Workload& w) { w.software.optimizer = "adam_bf16"; }).optimizer, 8 * elements);
  EXPECT_EQ(with([](Workload& w) { w.plan.offload = "optimizer"; }).optimizer, 0);
  // Of 4,096 tokens and the rank's part of the vocabulary: 16 bits instead of fp32.
  const double logits = 4096.0 * 51200 / 8;
  EXPECT_NEAR(plain.activations - with([](Workload& w) { w.software.loss = "fused"; }).activations, 2 * logits, 1e-6 * logits);
  EXPECT_GT(with([](Workload& w) { w.software.loss = "unfused"; }).workspace, 1.5 * 4 * logits);
  const double all = activation_bytes_of_layer(base, 2);
  const MemoryEstimate full = with([](Workload& w) { w.plan.recompute.mode = "full"; });
  EXPECT_NEAR(plain.activations - full.activations, 96 * (all - 2 * 4096 * 12288.0), 1e6);
  EXPECT_NEAR(full.workspace - plain.workspace, all - 2 * 4096 * 12288.0, 1e6);
  const MemoryEstimate half = with([](Workload& w) { w.plan.recompute.mode = "full", w.software.recomputed_layers = 48; });
  EXPECT_NEAR(half.activations, 0.5 * (plain.activations + full.activations), 1e6);
  const MemoryEstimate groups = with([](Workload& w) { w.plan.recompute.mode = "full", w.plan.recompute.layers = 4; });
  EXPECT_NEAR(full.activations - groups.activations, 72 * 2 * 4096 * 12288.0, 1e6);
  // Operands of products in 8 bits: norms' outputs and the MLP's middle; attention's output is kept twice.
  EXPECT_NEAR(plain.activations - with([](Workload& w) { w.software.product_dtype = "fp8"; }).activations,
              96 * 4096 * (2 * 12288.0 + 4 * 12288.0 / 8 - 12288.0 / 8), 1e6);
}

TEST(MemoryModel, ShardedParametersAreWholeOneAfterTheOther) {
  Workload workload = gpt3(1, 1, 1);
  workload.plan.parallel.data = 64;
  workload.plan.zero_stage = 3;
  const double layer = parameters_of_layer(workload.model);
  const MemoryEstimate memory = estimate_memory(workload, with_memory(80e9));
  EXPECT_DOUBLE_EQ(memory.communication, 2 * (2 * layer) + 4 * layer);  // two in 16 bits, one unit's gradients in fp32
  workload.plan.zero_stage = 2;
  EXPECT_DOUBLE_EQ(estimate_memory(workload, with_memory(80e9)).communication, 4 * layer);
  const double dealt = estimate_memory(workload, with_memory(80e9)).gradients;
  workload.software.scatter_each_micro_batch = false;
  EXPECT_NEAR(estimate_memory(workload, with_memory(80e9)).gradients / dealt, 64, 1e-9);
  workload.plan.zero_stage = 1;
  EXPECT_EQ(estimate_memory(workload, with_memory(80e9)).communication, 0);
  // Context ranks hold the same parameters, too.
  Workload split = workload;
  split.plan.parallel.data = 32;
  split.plan.parallel.context = 2;
  EXPECT_DOUBLE_EQ(estimate_memory(split, with_memory(80e9)).optimizer, estimate_memory(workload, with_memory(80e9)).optimizer);
}

TEST(MemoryModel, GroupedQueriesAndGatesKeepTheirOwn) {
  Workload workload = gpt3(1, 1, 1);
  workload.model = read_model_shape("llama3-8b");
  workload.software.fused_attention = true;
  // 4 inputs and outputs of norms, queries, attention's output, keys and values of 8 heads, gate, up and their product.
  const double bytes = 2 * (4 * 4096.0 + 2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 32;
  EXPECT_DOUBLE_EQ(activation_bytes_of_layer(workload, 1), 8192 * bytes);
  workload.plan.parallel.tensor = 16;  // twice as many as there are key-value heads: each has one
  EXPECT_DOUBLE_EQ(layer_memory(workload).key_value_width, 128);
}

std::string first_conflict(const Workload& workload) {
  const std::vector<Conflict> found = conflicts(workload);
  return found.empty() ? "" : found.front().option;
}

TEST(Workload, SaysWhatDoesNotFitTogether) {
  const Workload good = gpt3(8, 8, 3);
  EXPECT_EQ(first_conflict(good), "");
  Workload bad = good;
  bad.plan.parallel.tensor = 7;
  EXPECT_EQ(first_conflict(bad), "tensor");
  bad = good, bad.plan.batch.micro_batches = 60;
  EXPECT_EQ(first_conflict(bad), "micro_batches");
  bad = good, bad.plan.parallel.data = 2;
  EXPECT_EQ(first_conflict(bad), "rows");
  bad = good, bad.plan.pipeline.schedule = "zb-3";
  EXPECT_EQ(first_conflict(bad), "pipeline_schedule");
  bad = good, bad.plan.pipeline.chunks = 16;
  EXPECT_EQ(first_conflict(bad), "pipeline");
  bad = good, bad.plan.pipeline.stage_layers = "96-0";
  EXPECT_EQ(first_conflict(bad), "stage_layers");
  bad = good, bad.model.kv_heads = 3;
  EXPECT_EQ(first_conflict(bad), "tensor");
  bad = good, bad.software.selective = "none";
  EXPECT_EQ(first_conflict(bad), "selective");
  bad = good, bad.plan.parallel.data = 0;
  EXPECT_THROW(require_possible(bad), InputError);
}

}  // namespace
}  // namespace tandem

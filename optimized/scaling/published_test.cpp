// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/published.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"
#include "optimized/scaling/cost_model.h"
#include "optimized/scaling/published_figures_test_support.h"

namespace tandem {
namespace {

TEST(Published, SetsHoldEveryRowWithASourceAndALayoutThatCanBe) {
  const std::vector<PublishedRow> rows = published_rows("all");
  std::map<std::string, int> sets;
  std::set<std::string> ids;
  int gated = 0;
  for (const PublishedRow& row : rows) {
    ++sets[row.set];
    EXPECT_TRUE(ids.insert(row.id).second) << row.id;
    EXPECT_FALSE(row.source.empty() || row.table.empty() || row.derived_by.empty()) << row.id;
    EXPECT_NO_THROW(require_possible(row.workload)) << row.id;
    gated += is_gated(row);
  }
  const std::map<std::string, int> expected = {
      {"bloom", 76}, {"gpt-neox", 1},    {"ibm-fsdp", 6},         {"korthikanti", 4}, {"llama3", 1}, {"llm-foundry", 142},
      {"llm.c", 1},  {"megascale", 21},  {"megatron-bridge", 46}, {"mlperf", 34},     {"mt-nlg", 2}, {"pythia", 6},
      {"sc21", 15},  {"torchtitan", 25}, {"vtrain", 122},         {"zero-bubble", 36}};
  EXPECT_EQ(sets, expected);
  EXPECT_EQ(rows.size(), 538U);
  EXPECT_GE(gated, 480);
}

// Model FLOP/s that a source prints beside its times are the ones of the configuration that was read.
TEST(Published, PrintedUtilizationIsThatOfTheRow) {
  int checked = 0;
  for (const PublishedRow& row : published_rows("all")) {
    if (!row.published_mfu || row.derived_by != "published" || row.workload.software.product_dtype != "") continue;
    const double peak = cluster_of(row).device.peak_flops.at(row.workload.plan.precision);
    const double flops = 3 * static_cast<double>(row.workload.plan.batch.rows) *
                         forward_flops_per_row(row.workload.model, row.workload.tokens_per_row(), AttentionFlops::full);
    EXPECT_NEAR(flops / (row.step_seconds * row.devices * peak) / *row.published_mfu, 1, 0.02) << row.id;
    ++checked;
  }
  EXPECT_EQ(checked, 10);
}

TEST(Published, EveryRowHasAClusterWithWhatTheRowStates) {
  std::map<std::pair<std::string, int>, std::vector<PublishedRow>> kinds;
  for (PublishedRow& row : published_rows("all")) kinds[{row.hardware, row.devices_per_node}].push_back(row);
  for (const auto& [kind, rows] : kinds) {
    const ClusterSpec cluster = cluster_of(rows.front());
    EXPECT_EQ(cluster.device.name, kind.first);
    EXPECT_EQ(cluster.devices_per_node, kind.second);
    EXPECT_EQ(cluster.nodes, 0);
  }
  PublishedRow row = published_rows("sc21").front();
  row.network_bytes_per_second = 12.5e9;
  EXPECT_EQ(cluster_of(row).levels.back().bytes_per_second, 12.5e9);
  row.hardware = "Z9";
  EXPECT_THROW(static_cast<void>(cluster_of(row)), InputError);
}

// What a row says of the network between nodes says nothing of the links inside the one node that there is.
TEST(Published, AMachineOfOneNodeHasNoNetworkToSetTheSpeedOf) {
  const TestFolder folder;
  PublishedRow row = published_rows("sc21").front();
  ClusterSpec node = cluster_of(row);
  node.levels.resize(1);
  node.levels.front().devices = 0;
  row.cluster = folder.write("node.json", to_json(node));
  row.network_bytes_per_second = 12.5e9;

  EXPECT_NE(node.levels.front().bytes_per_second, 12.5e9);
  EXPECT_EQ(cluster_of(row).levels.front().bytes_per_second, node.levels.front().bytes_per_second);
}

const std::string kFile = R"({"format": "tandem-published", "version": 1, "set": "mine", "title": "T", "year": 2030, "ref": "R",
  "software": {"fused_attention": false, "gradients": "stored"},
  "models": {"m": {"layers": 6, "hidden": 64, "heads": 4, "vocabulary": 100, "sequence": 32}},
  "rows": [{"id": "a", "table": "1", "device": "D", "devices": 16, "network_gbps": 100, "model": "m", "sequence": 64,
            "precision": "fp16", "tensor": 2, "pipeline": 4, "data": 2, "lighter_ends": true, "zero": 1, "recompute": "full",
            "micro_rows": 2, "rows": 32, "software": {"overlap_tensor": true}, "seconds": 1.5, "from": "MFU", "mfu": 40,
            "assumed": ["micro_rows"], "memory_gib": 2}]})";

TEST(Published, ARowIsReadAsItsWorkload) {
  const std::vector<PublishedRow> rows = published_rows_from(kFile, "f.json");
  ASSERT_EQ(rows.size(), 1U);
  const PublishedRow& row = rows.front();
  const Workload& workload = row.workload;
  EXPECT_EQ(row.source, "T (2030), R");
  EXPECT_EQ(row.network_bytes_per_second, 12.5e9);
  EXPECT_EQ(workload.tokens_per_row(), 64);
  EXPECT_EQ(workload.plan.parallel, (ParallelDegrees{2, 2, 4, 1, 1}));
  EXPECT_EQ(workload.plan.pipeline.stage_layers, "1-2-2-1");
  EXPECT_EQ(workload.plan.batch, (GlobalBatch{32, 8}));
  EXPECT_EQ(workload.plan.zero_stage, 1);
  EXPECT_EQ(workload.plan.recompute.mode, "full");
  EXPECT_EQ(workload.plan.numerics.reduce, DType::f16);
  EXPECT_FALSE(workload.software.fused_attention);
  EXPECT_TRUE(workload.software.overlap_tensor);
  EXPECT_EQ(row.derived_by, "MFU");
  EXPECT_EQ(*row.published_mfu, 0.4);
  EXPECT_EQ(*row.device_bytes, 2147483648.0);
  EXPECT_FALSE(row.complete || is_gated(row));
}

std::string refusal(const std::string& from, const std::string& to) {
  std::string text = kFile;
  text.replace(text.find(from), from.size(), to);
  try {
    static_cast<void>(published_rows_from(text, "f.json"));
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(Published, RefusesWhatIsWrongWithFileAndField) {
  EXPECT_EQ(refusal("\"devices\": 16", "\"devices\": 12"), "f.json: field 'rows[0].devices' is 12, but the layout has 16");
  EXPECT_NE(refusal("\"tensor\"", "\"tensr\"").find("did you mean tensor"), std::string::npos);
  EXPECT_NE(refusal("\"rows\": 32", "\"rows\": 30").find("no multiple of the 4 rows"), std::string::npos);
  EXPECT_NE(refusal("\"model\": \"m\"", "\"model\": \"n\"").find("does not describe"), std::string::npos);
  EXPECT_NE(refusal("\"layers\": 6", "\"layers\": 7").find("lighter_ends"), std::string::npos);
  EXPECT_NE(refusal("\"stored\"", "\"none\"").find("wide or stored"), std::string::npos);
  EXPECT_NE(refusal("\"version\": 1", "\"version\": 2").find("version"), std::string::npos);
  EXPECT_THROW(static_cast<void>(published_rows("sc22")), InputError);
}

TEST(Published, SummariesAreThoseOfTheErrors) {
  std::vector<PublishedRow> rows = published_rows_from(kFile, "f.json");
  rows.resize(8, rows.front());
  const double published[] = {1, 2, 3, 4, 10, 10, 10, 20};
  const double predicted[] = {1.1, 2.0, 4.5, 3.6, 10, 0, 9, 2};
  std::vector<PublishedError> errors;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].step_seconds = published[i];
    if (i == 6) rows[i].set = "other";
    if (i == 4 || i == 7) rows[i].table = "2";  // too few to be compared in their order, which is wrong
    PublishedError error;
    error.row = &rows[i];
    error.predicted_seconds = predicted[i];
    if (i == 5) error.refused = "not possible";
    errors.push_back(error);
  }
  const std::vector<ErrorSummary> summaries = summarize(errors);
  ASSERT_EQ(summaries.size(), 3U);
  const ErrorSummary& mine = summaries[0];
  EXPECT_EQ(mine.name, "mine");
  EXPECT_EQ(mine.rows, 6);
  EXPECT_EQ(mine.refused, 1);
  EXPECT_NEAR(mine.median_absolute, 0.1, 1e-12);  // of 0, 0, 0.1, 0.1, 0.5, 0.9
  EXPECT_NEAR(mine.p90_absolute, 0.7, 1e-12);
  EXPECT_NEAR(mine.worst_absolute, 0.9, 1e-12);
  EXPECT_NEAR(mine.mean_signed, -0.4 / 6, 1e-12);
  EXPECT_EQ(mine.tables, 1);
  EXPECT_NEAR(mine.kendall_tau, 4.0 / 6, 1e-12);  // one pair of six is turned round
  EXPECT_NEAR(mine.kendall_tau_throughput, 4.0 / 6, 1e-12);
  EXPECT_EQ(summaries[1].name, "other");
  EXPECT_EQ(summaries[2].name, "all");
  EXPECT_EQ(summaries[2].rows, 7);
}

TEST(Published, TiesCountAsTauBSays) {
  std::vector<PublishedRow> rows = published_rows_from(kFile, "f.json");
  rows.resize(4, rows.front());
  const double published[] = {1, 1, 2, 3};
  const double predicted[] = {1, 2, 3, 4};
  std::vector<PublishedError> errors;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].step_seconds = published[i];
    PublishedError error;
    error.row = &rows[i];
    error.predicted_seconds = predicted[i];
    errors.push_back(error);
  }
  EXPECT_NEAR(summarize(errors).front().kendall_tau, 5 / std::sqrt(5.0 * 6.0), 1e-12);
}

TEST(Published, PredictionsAreOfTheRowAndRefusalsSaySo) {
  std::vector<PublishedRow> rows = published_rows("korthikanti");
  rows.resize(2);
  rows[1].workload.plan.parallel.tensor = 7;
  const std::vector<PublishedError> errors = predict(rows);
  ASSERT_EQ(errors.size(), 2U);
  EXPECT_EQ(errors[0].refused, "");
  EXPECT_NEAR(errors[0].relative(), 0, 0.3);
  EXPECT_NE(errors[1].refused.find("heads"), std::string::npos);
}

ClusterSpec machine_of(const PublishedFigure& figure) {
  PublishedRow row;
  row.id = figure.id;
  row.hardware = figure.device;
  row.devices_per_node = static_cast<int>(figure.number_or("devices_per_node", 8));
  return cluster_of(row);
}

TEST(Published, LargeSumsInsideANodeAreNearTheMeasuredOnes) {
  int checked = 0;
  for (const PublishedFigure& figure : published_figures("collectives")) {
    const double ranks = figure.numbers.at("devices");
    if (figure.suspect || figure.words.at("op") != "all_reduce" || ranks != 8 || figure.device == "V100-32GB") continue;
    const ClusterSpec cluster = machine_of(figure);
    TrainingPlan plan;
    plan.parallel.data = static_cast<int>(ranks);
    for (const auto& [bytes, bandwidth] : figure.points) {
      if (bytes < 1e8) continue;
      const double seconds =
          CostModel(cluster).collective_seconds(Collective::all_reduce, bytes, placement(plan, GroupAxis::data, cluster));
      EXPECT_NEAR(2 * (ranks - 1) / ranks * bytes / seconds / (1e9 * bandwidth), 1, 0.3) << figure.id << " " << bytes;
      ++checked;
    }
  }
  EXPECT_GE(checked, 9);
}

TEST(Published, NoDeviceMultipliesFasterThanTheFastestMeasured) {
  int checked = 0;
  for (const PublishedFigure& figure : published_figures("matmuls")) {
    if (figure.device == "B300-288GB") continue;  // no cluster has it
    const ClusterSpec cluster = machine_of(figure);
    const CostModel model(cluster);
    double best = 0;
    for (const double n : {4096.0, 8192.0, 16384.0}) {
      best = std::max(best, 2 * n * n * n / model.matmul_seconds(n, n, n, figure.words.at("dtype")));
    }
    EXPECT_LT(best, 1.1e12 * figure.numbers.at("tflops")) << figure.id;
    EXPECT_GT(best, 0.6e12 * figure.numbers.at("tflops")) << figure.id;
    ++checked;
  }
  EXPECT_EQ(checked, 8);
  EXPECT_THROW(static_cast<void>(published_figures("bubbles")), InputError);
}

}  // namespace
}  // namespace tandem

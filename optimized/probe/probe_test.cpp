// SPDX-License-Identifier: Apache-2.0
#include "optimized/probe/probe.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/io/test_folder.h"
#include "kernels/kernels.h"
#include "optimized/probe/measure.h"
#include "optimized/scaling/cost_model.h"

namespace tandem {
namespace {

std::vector<LinkSample> samples_of(double latency_seconds, double bytes_per_second) {
  std::vector<LinkSample> samples;
  for (const std::int64_t bytes : {8, 1024, 65536, 1048576}) {
    const double seconds = latency_seconds + static_cast<double>(bytes) / bytes_per_second;
    samples.push_back({0, 1, bytes, 3 * seconds, seconds});
  }
  return samples;
}

TEST(Probe, FindsLatencyAndBandwidthOfALink) {
  const AlphaBeta link = fit_link(samples_of(5e-6, 12e9));
  EXPECT_NEAR(link.latency_seconds, 5e-6, 1e-12);
  EXPECT_NEAR(link.bytes_per_second, 12e9, 1);
  const AlphaBeta slow = fit_link(samples_of(0.01, 1e6));
  EXPECT_NEAR(slow.latency_seconds, 0.01, 1e-9);
  EXPECT_NEAR(slow.bytes_per_second, 1e6, 1);
}

TEST(Probe, RefusesMessagesThatSayNothingOfALink) {
  EXPECT_THROW((void)fit_link({{0, 1, 8, 1e-6, 1e-6}, {0, 1, 8, 2e-6, 2e-6}}), ContractError) << "one size";
  EXPECT_THROW((void)fit_link({{0, 1, 8, 1e-3, 1e-3}, {0, 1, 1 << 20, 1e-6, 1e-6}}), ContractError) << "more takes less";
}

// A processor described by constants: samples that its own model makes are found again, and what was kept apart is predicted.
TEST(Probe, FindsTheConstantsOfADescribedProcessor) {
  ClusterSpec truth;
  truth.device.name = "made up";
  truth.device.peak_flops = {{"fp32", 2e11}, {"bf16", 4e11}};
  truth.device.memory_bytes_per_second = 2e10;
  truth.device.constants = {{"multiprocessors", 1},           {"tile_scale", 0.125},
                            {"kernel_seconds", 2e-6},         {"memory_efficiency", 0.7},
                            {"matmul_efficiency.fp32", 0.85}, {"matmul_half_depth.fp32", 20},
                            {"matmul_efficiency.bf16", 0.7},  {"matmul_half_depth.bf16", 60}};
  const CostModel model(truth);
  std::vector<MatrixSample> samples;
  for (const std::string dtype : {"fp32", "bf16"}) {
    for (const std::int64_t m : {8, 64, 256, 1024}) {
      for (const std::int64_t k : {32, 256, 1024}) {
        const double seconds = model.matmul_seconds(static_cast<double>(m), 512, static_cast<double>(k), dtype);
        samples.push_back({m, 512, k, dtype, seconds, 0, m != 256});
      }
    }
  }
  ClusterSpec found;
  found.device = truth.device;
  found.device.constants = {{"memory_efficiency", 0.7}};
  fit_device(found, samples);
  for (const MatrixSample& sample : samples) {
    EXPECT_NEAR(sample.predicted_seconds / sample.seconds, 1, 0.05) << sample.m << " x 512 x " << sample.k << " " << sample.dtype;
  }
}

TEST(Probe, KeepsWhatAGpuSaysOfItselfWhereItFits) {
  ClusterSpec truth;
  truth.device.name = "made up";
  truth.device.peak_flops = {{"bf16", 9e14}};
  truth.device.memory_bytes_per_second = 4e12;
  truth.device.constants = {{"multiprocessors", 132},   {"kernel_seconds", 4e-6},         {"memory_efficiency", 0.9},
                            {"host_kernel_seconds", 0}, {"matmul_efficiency.bf16", 0.75}, {"matmul_half_depth.bf16", 100}};
  const CostModel model(truth);
  std::vector<MatrixSample> samples;
  for (const std::int64_t m : {256, 1024, 4096, 8192}) {
    for (const std::int64_t k : {64, 768, 4096}) {
      const double seconds = model.matmul_seconds(static_cast<double>(m), 4096, static_cast<double>(k), "bf16");
      samples.push_back({m, 4096, k, "bf16", seconds, 0, m != 1024});
    }
  }
  ClusterSpec found;
  found.device = truth.device;
  found.device.constants = {{"memory_efficiency", 0.9}, {"multiprocessors", 132}};
  fit_device(found, samples);
  EXPECT_EQ(found.device.constants.at("multiprocessors"), 132);
  EXPECT_EQ(found.device.constants.at("tile_scale"), 1);
  for (const MatrixSample& sample : samples) {
    EXPECT_NEAR(sample.predicted_seconds / sample.seconds, 1, 0.05) << sample.m << " x 4096 x " << sample.k;
  }
}

// Of an emulated GPU the numbers mean nothing; here they come about as those of a real one do.
TEST(Probe, MeasuresProductsMemoryAndAttentionOfAGpu) {
  if (const std::string why = why_no_gpu("simt"); !why.empty()) GTEST_SKIP() << why;
  const probing::MachineFigures figures = probing::measure_gpu("simt", 0, 0.01);
  std::set<std::string> dtypes;
  for (const MatrixSample& sample : figures.matrices) {
    dtypes.insert(sample.dtype);
    EXPECT_GT(sample.seconds, 0);
    EXPECT_DOUBLE_EQ(sample.flops_per_second * sample.seconds, 2.0 * static_cast<double>(sample.m * sample.n * sample.k));
  }
  EXPECT_EQ(dtypes, (std::set<std::string>{"bf16", "fp32"}));
  EXPECT_GT(figures.copy_bytes_per_second, 0);
  EXPECT_GT(figures.add_bytes_per_second, 0);
  EXPECT_GT(figures.snapshot_bytes_per_second, 0);
  EXPECT_GT(figures.attention_seconds, 0);
  EXPECT_GT(figures.attention_backward_seconds, 0);
  EXPECT_FALSE(figures.gpu.empty());
  EXPECT_GT(figures.gpu_memory_bytes, 0);
  EXPECT_GT(figures.multiprocessors, 0);
}

TEST(Probe, RanksSlowOnesFirstByTheWorstOfTheirFigures) {
  std::vector<RankSpeed> speeds(4);
  for (int rank = 0; rank < 4; ++rank) speeds[static_cast<std::size_t>(rank)] = {rank, "host", 1e11, 1e10, 2e-6, 1};
  speeds[1].message_seconds = 3e-6;
  speeds[2].matrix_flops_per_second = 0.4e11;
  rank_speeds(speeds);
  EXPECT_EQ(speeds[0].rank, 2);
  EXPECT_DOUBLE_EQ(speeds[0].slowness, 2.5);
  EXPECT_EQ(speeds[1].rank, 1);
  EXPECT_DOUBLE_EQ(speeds[1].slowness, 1.5);
  EXPECT_EQ(speeds[2].rank, 0);
  EXPECT_EQ(speeds[3].rank, 3);
}

TEST(Probe, RefusesABandwidthBeyondWhatTheMachineCopies) {
  EXPECT_NO_THROW(require_possible(1.1e10, 1e10, "a message"));
  try {
    require_possible(8e10, 1e10, "a message of 8 bytes");  // bits taken for bytes
    FAIL();
  } catch (const ContractError& error) {
    EXPECT_NE(std::string(error.what()).find("a message of 8 bytes would move 80 GB/s"), std::string::npos) << error.what();
  }
}

TEST(Probe, ListsWhatANodeHas) {
  const TestFolder folder;
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((folder.path() / path).parent_path());
    std::ofstream(folder.path() / path) << text;
  };
  write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Made Up 9000\n");
  write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX 550.1\n");
  write("sys/class/net/lo/speed", "10\n");
  write("sys/class/net/eth0/speed", "25000\n");
  write("sys/class/net/eth1/speed", "-1\n");
  write("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n");
  const NodeInventory node = node_inventory(folder.path());
  EXPECT_EQ(node.cpu, "Made Up 9000");
  EXPECT_EQ(node.driver, "NVIDIA UNIX 550.1");
  EXPECT_EQ(node.nics, (std::vector<std::string>{"eth0 25000 Mb/s", "eth1", "mlx5_0 400 Gb/sec (4X NDR)"}));
  EXPECT_GT(node.cores, 0);
  EXPECT_FALSE(node.host.empty());
}

TEST(Probe, WritesAClusterFileThatIsRead) {
  const TestFolder folder;
  LinkProfile link;
  link.name = "stated";
  link.ranks_per_node = 2;
  // On the wall a message takes milliseconds, beside which a busy machine is quick.
  link.in_node = {5e-5, 1e9, 0};
  link.between_nodes = {2e-4, 2e8, 0};
  link.dilation = 10;
  ProbeOptions options;
  options.ranks = 3;
  options.world.link = link;
  options.seconds = 0.3;
  options.storage_folder = folder.path().string();

  const ProbeReport report = probe(options);

  const ClusterSpec read = cluster_from_json(to_json(report), "probe.json");
  ASSERT_EQ(read.levels.size(), 2U);
  EXPECT_EQ(read.levels[0].devices, 2);
  EXPECT_EQ(read.devices_per_node, 2);
  EXPECT_EQ(read.device.constants, report.cluster.device.constants);
  EXPECT_GT(read.device.peak_flops.at("fp32"), 0);
  EXPECT_GT(read.storage.write_bytes_per_second, 0);
  EXPECT_EQ(report.slowest_first.size(), 3U);
  EXPECT_EQ(report.dilation, 10);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "what was written to measure storage";
  // No time is asserted, only that each level was told from the other.
  EXPECT_GT(read.levels[1].latency_seconds, read.levels[0].latency_seconds);
  EXPECT_LT(read.levels[1].bytes_per_second, read.levels[0].bytes_per_second);
}

}  // namespace
}  // namespace tandem

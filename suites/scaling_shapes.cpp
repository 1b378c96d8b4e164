// SPDX-License-Identifier: Apache-2.0
#include "suites/scaling_shapes.h"

namespace tandem {
namespace {

NetworkLevel level(const std::string& name, int devices, double bytes_per_second, double latency_seconds) {
  NetworkLevel level;
  level.name = name;
  level.devices = devices;
  level.bytes_per_second = bytes_per_second;
  level.latency_seconds = latency_seconds;
  return level;
}

}  // namespace

ClusterSpec made_up_cluster() {
  ClusterSpec cluster;
  cluster.name = "made-up";
  cluster.device.name = "made-up";
  cluster.device.peak_flops = {{"fp32", 2e13}, {"bf16", 3e14}};
  cluster.device.memory_bytes = 80e9;
  cluster.device.memory_bytes_per_second = 2e12;
  cluster.device.constants = {{"kernel_seconds", 0}, {"host_kernel_seconds", 0}, {"overlap_interference", 0}};
  cluster.devices_per_node = 8;
  cluster.levels = {level("link", 0, 25e9, 2e-6)};
  return cluster;
}

ClusterSpec made_up_nodes(int per_node) {
  ClusterSpec cluster = made_up_cluster();
  cluster.devices_per_node = per_node;
  cluster.levels = {level("near", per_node, 200e9, 2e-6), level("far", 0, 25e9, 5e-6)};
  return cluster;
}

Workload gpt_workload(const std::string& size, ParallelDegrees degrees, std::int64_t rows, int micro_batches) {
  Workload workload;
  workload.model = read_model_shape(size == "175b" ? "gpt3-175b" : "gpt-" + size);
  workload.plan.parallel = degrees;
  workload.plan.precision = "bf16";
  workload.plan.numerics = numerics_from_precision("bf16");
  workload.plan.batch = {rows, micro_batches};
  return workload;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/cluster.h"
#include "optimized/scaling/workload.h"

namespace tandem {

inline constexpr double kPeak = 1e14;

// A device that reaches its peak with every shape that fills its tiles, and memory that costs nothing.
inline ClusterSpec ideal_cluster() {
  ClusterSpec cluster;
  cluster.name = "ideal";
  cluster.device.name = "ideal";
  cluster.device.peak_flops = {{"bf16", kPeak}, {"fp8", 2 * kPeak}};
  cluster.device.memory_bytes = 1e12;
  cluster.device.memory_bytes_per_second = 1e30;
  cluster.device.constants = {{"multiprocessors", 1},
                              {"memory_efficiency", 1},
                              {"kernel_seconds", 0},
                              {"host_kernel_seconds", 0},
                              {"attention_forward_efficiency", 1},
                              {"attention_backward_efficiency", 1},
                              {"overlap_interference", 0},
                              {"matmul_efficiency.bf16", 1},
                              {"matmul_half_depth.bf16", 0},
                              {"matmul_efficiency.fp8", 1},
                              {"matmul_half_depth.fp8", 0}};
  cluster.devices_per_node = 8;
  cluster.levels = {{"near", 8, 1e11, 1e-6, 1, 1, 0}, {"far", 0, 1e10, 5e-6, 1, 1, 0}};
  return cluster;
}

inline Workload small_workload(int data, int tensor, int pipeline, int micro_batches) {
  Workload workload;
  workload.model.name = "small";
  workload.model.layers = 8;
  workload.model.hidden = 1024;
  workload.model.heads = 8;
  workload.model.vocabulary = 1024;
  workload.model.sequence = 1024;
  workload.plan.parallel = {data, tensor, pipeline, 1, 1};
  workload.plan.batch = {static_cast<std::int64_t>(data) * micro_batches, micro_batches};
  workload.plan.precision = "bf16";
  return workload;
}

}  // namespace tandem

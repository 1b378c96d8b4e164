// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/goodput.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace tandem {
namespace {

constexpr double kHour = 3600;

// What a step needs to go on: parameters as computed with, master copy and moments.
double checkpoint_bytes(const Workload& workload) {
  const Numerics& numerics = workload.plan.numerics;
  const auto bytes = [](DType dtype) { return static_cast<double>(size_bytes(dtype)); };
  const double moment = workload.software.optimizer == "adam_bf16" ? 2 : bytes(numerics.master);
  const double master = numerics.has_master_copy() ? bytes(numerics.master) : 0;
  return num_parameters(workload.model) * (bytes(numerics.storage) + master + 2 * moment);
}

double write_seconds(double bytes, const StorageSpec& storage, int nodes) {
  double rate = storage.write_bytes_per_second_per_node * nodes;
  if (storage.write_bytes_per_second > 0) {
    rate = rate > 0 ? std::min(rate, storage.write_bytes_per_second) : storage.write_bytes_per_second;
  }
  return rate > 0 ? bytes / rate : 0;
}

}  // namespace

GoodputEstimate estimate_goodput(const Workload& workload, const ClusterSpec& cluster, int devices, double step_seconds,
                                 bool async) {
  TANDEM_CHECK(devices >= 1 && step_seconds > 0, "a step of no device, or of no time");
  const int nodes = (devices + cluster.devices_per_node - 1) / cluster.devices_per_node;
  GoodputEstimate estimate;
  estimate.checkpoint_bytes = checkpoint_bytes(workload);
  const double written = write_seconds(estimate.checkpoint_bytes, cluster.storage, nodes);
  const double snapshot = cluster.storage.snapshot_bytes_per_second;
  // Copied into host memory by each device, an equal share.
  const bool in_background = async && snapshot > 0;
  estimate.costs.save_seconds = in_background ? std::min(written, estimate.checkpoint_bytes / devices / snapshot) : written;
  estimate.costs.restart_seconds = cluster.reliability.restart_seconds;
  if (cluster.reliability.node_failure_hours <= 0) return estimate;
  estimate.costs.failure_seconds = cluster.reliability.node_failure_hours * kHour / nodes;
  estimate.failures_per_day = 24 * kHour / estimate.costs.failure_seconds;
  double interval = std::max(step_seconds, daly_interval_seconds(estimate.costs));
  if (in_background) interval = std::max(interval, written);
  estimate.interval_seconds = std::ceil(interval / step_seconds - 1e-9) * step_seconds;
  estimate.useful_share = goodput(estimate.costs, estimate.interval_seconds);
  return estimate;
}

}  // namespace tandem

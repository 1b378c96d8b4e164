// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/cluster.h"
#include "core/world_settings.h"

namespace tandem {

struct ProbeOptions {
  int ranks = 2;
  WorldSettings world;
  std::string backend = "cpu";  ///< whose products and memory are measured: cpu or cuda
  double seconds = 20;          ///< budget of all measurements together
  std::string storage_folder;   ///< where storage is measured; empty: not
};

/// One shape of a matrix product: C[m, n] = A[m, k] B[k, n], operands in `dtype` and from memory, not from a cache.
struct MatrixSample {
  std::int64_t m = 0, n = 0, k = 0;
  std::string dtype;
  double seconds = 0;  ///< on its core; best of the rank; of a report: median over ranks
  double flops_per_second = 0;
  bool fitted = true;            ///< the constants were fitted to it; false: kept apart, to check them
  double predicted_seconds = 0;  ///< by CostModel with the fitted constants
};
struct LinkSample {
  int rank = 0, peer = 0;
  std::int64_t bytes = 0;
  double seconds = 0;         ///< one way: half of a round trip, median over chains of trips
  double fitted_seconds = 0;  ///< the same, least: other work on the machine only adds to it; shaped link: the 30th percentile
};
/// Ranks of one level that sum up a tensor, beside what latency and bandwidth of the level predict.
struct CollectiveSample {
  std::string level;
  int ranks = 0;
  std::int64_t bytes = 0;
  double seconds = 0, predicted_seconds = 0;
};
struct StorageSample {
  std::string host;
  double read_bytes_per_second = 0, write_bytes_per_second = 0;  ///< write: until fsync has returned
  bool direct = false;                                           ///< read past the page cache (O_DIRECT)
};
struct NodeInventory {
  std::string host, cpu;
  int cores = 0;  ///< that this process may use
  double memory_bytes = 0;
  std::vector<std::string> gpus, nics;
  std::string driver, nccl, kernel;  ///< empty: none
};
/// What a rank gets of its machine, whatever else runs there, and how far it lies from the others'.
struct RankSpeed {
  int rank = 0;
  std::string host;
  double matrix_flops_per_second = 0, memory_bytes_per_second = 0, message_seconds = 0;
  double slowness = 1;  ///< median of all ranks / its own, worst of the three figures
};

struct ProbeReport {
  ClusterSpec cluster;  ///< fitted: peaks, constants of the cost model by shape, alpha and beta by level
  std::vector<MatrixSample> matrices;
  std::vector<LinkSample> links;
  std::vector<CollectiveSample> collectives;
  std::vector<StorageSample> storage;
  std::vector<NodeInventory> nodes;
  std::vector<RankSpeed> slowest_first;
  double copy_bytes_per_second = 0;  ///< of one rank, bytes read and written, from memory to memory
  double dilation = 1;             ///< of a shaped link: the cluster is described on the link's clock, samples are on the wall's
  std::vector<std::string> notes;  ///< what was not measured, and why
};

/// Measures this machine, or the job that it is started in (every process calls it and has the same report). Throws InputError
/// where the world or the folder cannot be had, ContractError where a bandwidth is beyond what the same machine copies in memory:
/// a wrong measurement.
[[nodiscard]] ProbeReport probe(const ProbeOptions& options);
/// The cluster file, with raw samples and inventory under "probe" (which read_cluster() passes over).
[[nodiscard]] std::string to_json(const ProbeReport& report);

/// Of this machine, from `root`/proc and `root`/sys, NVML and the operating system.
[[nodiscard]] NodeInventory node_inventory(const std::filesystem::path& root = "/");

/// Latency a and bandwidth B of t = a + s / B from messages of several sizes, by least squares of the relative errors of
/// fitted_seconds; a is not below 0. Throws ContractError of fewer than two sizes, or where more bytes take no longer.
struct AlphaBeta {
  double latency_seconds = 0, bytes_per_second = 0;
};
[[nodiscard]] AlphaBeta fit_link(const std::vector<LinkSample>& samples);

/// Fits the device's constants of the cost model (matmul_efficiency and matmul_half_depth by type, kernel_seconds, tile_scale;
/// multiprocessors is 1 unless it is given, and then tile_scale) to the samples that are `fitted`, by least squares of the
/// logarithm of predicted over measured (outliers straight); peaks, memory's bandwidth and memory_efficiency are given. Then
/// predicts all samples.
void fit_device(ClusterSpec& cluster, std::vector<MatrixSample>& samples);

/// Fills in slowness and sorts, slowest first; ranks of equal slowness stay in order.
void rank_speeds(std::vector<RankSpeed>& speeds);

/// Nothing moves more bytes a second than its machine copies from and to memory or cache, whichever is faster. Throws
/// ContractError naming `what` above 1.2 times that.
void require_possible(double bytes_per_second, double copied_bytes_per_second, const std::string& what);

}  // namespace tandem

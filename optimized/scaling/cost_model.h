// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/cluster.h"
#include "core/process_grid.h"
#include "core/step_program.h"
#include "optimized/scaling/workload.h"

namespace tandem {

/// Where the members of one communication group lie, nearest level first: how many ranks of the group share an island of each
/// level. A group of 16 data ranks, 2 in each of 8 nodes: {2, 16}.
struct GroupPlacement {
  int size = 1;
  std::vector<int> ranks_in_island;  ///< [levels], ascending, the last one is size
  /// [levels] groups of the same kind that use an island's links of this level at once (contention).
  std::vector<int> groups_in_island;
  bool alone = false;  ///< fault point contention_ignored: as if the other groups left the links to this one
};
[[nodiscard]] GroupPlacement placement(const TrainingPlan& plan, GroupAxis axis, const ClusterSpec& cluster);

/// DeviceSpec::constants with the defaults filled in. Shares are of the peak (or of the bandwidth); docs/techniques/scaling.md
/// has where the shipped values come from.
struct DeviceConstants {
  double multiprocessors = 108;    ///< tiles of a product that are computed at once
  double tile_scale = 1;           ///< sides of tiles over those of a GPU's, 64 to 256; a CPU core's are smaller
  double memory_efficiency = 0.8;  ///< share of the memory bandwidth that passes over large tensors reach
  double kernel_seconds = 3e-6;    ///< of each kernel on the device, before and after its work
  double host_kernel_seconds =
      8e-6;  ///< of the host for each kernel that it launches; kernels wait for the host, not for its sum
  double attention_forward_efficiency = 0.6;  ///< fused attention: share of the 16-bit peak
  double attention_backward_efficiency = 0.5;
  double ported_attention_efficiency = 1;  ///< of that, what kernels written for the generation before reach
  double misaligned_efficiency = 0.4;      ///< factor of a product one of whose sizes is no multiple of 8
  /// Share of the shorter of two things that go on at once which is lost: collectives take multiprocessors and memory bandwidth.
  double overlap_interference = 0.15;
  double tensor_overlap_efficiency = 0.6;  ///< share of tensor communication that products in pieces hide
};

/// Seconds of single operations on a described cluster: the roofline of the device by shape, and alpha-beta links by level.
/// Every constant has a name in DeviceSpec::constants or NetworkLevel, and its formula stands in docs/techniques/scaling.md.
/// Keeps what it needs of the cluster; `cluster()` refers to the one given, which must outlive it.
class CostModel {
 public:
  explicit CostModel(const ClusterSpec& cluster);
  explicit CostModel(ClusterSpec&&) = delete;

  /// C[m, n] += A[m, k] B[k, n], operands of `dtype`: FLOPs over the share of the peak that this shape reaches (tiles that are
  /// not full, waves that are not full, short k), but no faster than its bytes through memory, and the launch.
  ///   share = matmul_efficiency x best over tile shapes (tile's own share x filled tiles x filled waves) x k / (k + half_depth)
  [[nodiscard]] double matmul_seconds(double m, double n, double k, std::string_view dtype) const;
  /// `count` products of this shape in one kernel.
  [[nodiscard]] double batched_matmul_seconds(double count, double m, double n, double k, std::string_view dtype) const;
  /// One kernel that reads and writes `bytes`: bytes / (bandwidth x memory_efficiency) + kernel_seconds.
  [[nodiscard]] double elementwise_seconds(double bytes) const;
  /// Attention of `rows` x `heads`, forward or backward, fused or materialized, causal.
  ///   fused         2 products of queries x keys x head_size (forward; 5 backward), half of them masked, at
  ///                 attention_*_efficiency whatever the sizes
  ///   materialized  2 (4) batched products of which nothing is masked; passes over the scores: score_passes_seconds()
  [[nodiscard]] double attention_seconds(double rows, double heads, double queries, double keys, double head_size, bool backward,
                                         bool fused, std::string_view dtype) const;
  /// Passes of softmax, mask and dropout over materialized scores, bytes of a score: one kernel for all three, or one each.
  [[nodiscard]] double score_passes_seconds(double scores, bool backward, bool fused_elementwise) const;
  /// `bytes` as Operation::bytes counts. A ring through all ranks moves 2 (n - 1) / n (all_reduce; otherwise half) of the bytes
  /// through the slowest level that it crosses, where the ranks of one island share its links; each hop has its level's latency.
  /// On one level all_reduce is 2 (n - 1) (alpha + bytes / (n bandwidth)). Over several it may be a double tree, if that is
  /// faster: 2 (i - 1) / i of the bytes between i islands, 2 of them within one, and the hops of the nearest level and log2 of
  /// the islands each way.
  [[nodiscard]] double collective_seconds(Collective collective, double bytes, const GroupPlacement& group) const;
  /// One message between neighbours along the pipeline, while every device of the island sends one.
  [[nodiscard]] double message_seconds(double bytes, int level) const;
  /// The nearest level whose islands hold both ranks.
  [[nodiscard]] int level_between(std::int64_t rank, std::int64_t other) const;

  [[nodiscard]] double peak_flops(std::string_view dtype) const;
  [[nodiscard]] const DeviceConstants& constants() const noexcept { return constants_; }
  [[nodiscard]] const ClusterSpec& cluster() const noexcept { return *cluster_; }

 private:
  struct OperandRate {
    std::string_view dtype;
    double flops = 0, bytes = 2;
    double efficiency = 0.8, half_depth = 256;
  };
  [[nodiscard]] const OperandRate& rate(std::string_view dtype) const;
  [[nodiscard]] double share_of_peak(double count, double m, double n, double k, const OperandRate& rate) const;

  const ClusterSpec* cluster_;
  DeviceConstants constants_;
  std::vector<OperandRate> rates_;
};

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/pitfall.h"
#include "core/step_program.h"
#include "core/world_settings.h"
#include "optimized/scaling/cost_model.h"

namespace tandem {

/// The programs that lower() makes, operation by operation: what the engine would execute. One rank stands for all that differ
/// from it in data, tensor and context coordinates alone (their programs are equal but for rows), so that 16,384 ranks are as
/// many programs as there are pipeline stages. [stages]: of the representative of each pipeline rank.
struct ReplayTiming {
  double step_seconds = 0;
  std::vector<double> busy_seconds;      ///< [stages] in compute and optimizer operations
  std::vector<double> exposed_seconds;   ///< [stages] waiting for communication: for peers, or for bytes to arrive
  std::vector<double> transfer_seconds;  ///< [stages] something of the rank's is on its way, hidden or not
  std::vector<double> hidden_seconds;    ///< [stages] of that, while the rank computes
  double communication_seconds = 0;      ///< transfer_seconds of the rank that has most
  std::int64_t operations = 0;           ///< of all programs
};

/// Seconds of an operation of the representative of pipeline stage `stage`.
using OperationCost = std::function<double(const Operation& operation, int stage)>;
using SharesLinks = std::function<bool(GroupAxis, GroupAxis)>;

/// The program of the first rank of each pipeline coordinate.
[[nodiscard]] std::vector<StepProgram> representative_programs(const TrainingPlan& plan, const GptConfig& model,
                                                               std::int64_t sequence);

/// Plays representative programs in time by the rules of time_programs() (core/step_program.h), of which it is the equal when
/// nothing shares links: a rank runs its operations in order; a collective begins when the stages of its group have issued it and
/// what they issued before on that axis is complete; sends go on at once, and a message takes the seconds of its recv. Groups
/// of the axes data, tensor, context, expert, gradient and expert_gradient hold ranks that do the same at the same time: here one
/// rank alone. Groups of world and model are all stages, of embedding the first and the last.
///
/// shares_links(a, b): operations of these two axes use the same links. While operations of k such axes are under way at a rank,
/// each goes on at 1 / k of its speed (processor sharing); a message at the slower of its two ends. Messages do not slow each
/// other down, and collectives of one axis follow each other anyway. Empty: nothing is shared.
///
/// Throws ContractError where the programs do not end or a message meets a receive of another. Fault points:
/// contention_ignored (shares_links is not asked), communication_counted_twice (what is waited for is hidden, too).
[[nodiscard]] ReplayTiming replay(const std::vector<StepProgram>& representatives, const TrainingPlan& plan,
                                  const OperationCost& cost, const SharesLinks& shares_links = {},
                                  const PitfallSet& pitfalls = {});
/// Of the plan's own programs. Fault point: bubble_not_scaled_by_chunks (every rank's layers are one chunk).
[[nodiscard]] ReplayTiming replay(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence,
                                  const OperationCost& cost, const SharesLinks& shares_links = {},
                                  const PitfallSet& pitfalls = {});

/// On a described cluster, as simulate() prices the same work of fused software: products by the matrix shapes of their part on
/// this rank, other parts by the bytes that they read and write (LayerCost), communication by where its group lies. What
/// simulate() adds for hosts that are slow to launch kernels and for interference is left out. Rows of uneven micro-batches count
/// by their mean in what is no product.
[[nodiscard]] OperationCost cost_on(const ClusterSpec& cluster, const TrainingPlan& plan, const GptConfig& model,
                                    std::int64_t sequence);
/// Axes whose groups use the links of the same level of the cluster.
[[nodiscard]] SharesLinks shares_links_on(const ClusterSpec& cluster, const TrainingPlan& plan);

/// On this machine over shaped links: computing by `compute_seconds`, communication by the link's rules and the algorithm of
/// `world` (optimized/collectives/algorithms.h expected_seconds), for the nodes in which the group's members lie; exact where
/// each node has as many of them. Without a link communication takes no time.
[[nodiscard]] OperationCost cost_measured(const WorldSettings& world, const TrainingPlan& plan,
                                          const std::function<double(const Operation&)>& compute_seconds);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "optimized/compression/compressed_reduction.h"
#include "optimized/data_parallel/buckets.h"
#include "optimized/hybrid_parallel/process_groups.h"
#include "optimized/rank_context.h"

namespace tandem {

/// What `rank` compresses: its local parameters in the order of the gradient buffer.
[[nodiscard]] std::vector<CompressedTensor> compressed_tensors(const std::vector<LocalParameter>& parameters);
/// The buckets of a plan with the groups that reduce them.
[[nodiscard]] std::vector<CompressedBucket> compressed_buckets(const TrainingPlan& plan, const ProcessGrid& grid, int rank,
                                                               const std::vector<LocalParameter>& parameters);
/// equivalent_bytes() of all tensors of a bucket that `ranks` ranks reduce.
[[nodiscard]] std::int64_t compressed_bucket_bytes(const CompressionConfig& config, const std::vector<LocalParameter>& parameters,
                                                   const GradientBucket& bucket, int ranks);

/// What CompressedReduction keeps for `rank` between steps, category gradients, every part of a sum counted as whole blocks; 0
/// where nothing is compressed.
[[nodiscard]] std::int64_t compressed_state_bytes(const TrainingPlan& plan, const ProcessGrid& grid, int rank,
                                                  const std::vector<LocalParameter>& parameters);

/// Reduces the gradient buckets of a rank as codes, at once or, with overlap, on a thread and communicators of its own while the
/// rank computes. Buckets are reduced one at a time, in the order in which they were started.
class CompressedSync {
 public:
  /// Collective over the groups: with overlap they are split. Borrows context, groups and what they point to. `coded`: where
  /// codes and residuals lie; in the host's memory, for that is where they are made, of gradients that are read from a device and
  /// whose sums are written back.
  CompressedSync(const RankContext& context, Arena& coded, const TrainingPlan& plan, std::uint64_t seed, ProcessGroups& groups,
                 const std::vector<LocalParameter>& parameters);
  /// Where a bucket is still under way, a failure is: the world is aborted so that nobody waits for this rank.
  ~CompressedSync();

  void begin_step(std::int64_t step, double gradient_scale) { reduction_.begin_step(step, gradient_scale); }
  /// Whoever needs the sum calls the result; it is empty where the sum is there already. It throws what went wrong.
  [[nodiscard]] std::function<void()> start(int bucket, TensorView gradients, Progress progress);
  /// After all buckets have been waited for. CompressedReduction::finish_step().
  void finish_step(bool applied) { reduction_.finish_step(applied); }

  [[nodiscard]] CompressedReduction& reduction() noexcept { return reduction_; }
  [[nodiscard]] const CompressedReduction& reduction() const noexcept { return reduction_; }
  /// Whether any bucket has more than one rank.
  [[nodiscard]] static bool is_active(const TrainingPlan& plan) {
    return plan.compression.codec != "none" && plan.parallel.data * plan.parallel.context > 1;
  }

 private:
  void work(const std::stop_token& stop);
  void reduce(Memory& lane, Communicator& replicas, TensorView gradients, int bucket, Progress progress);

  Memory& memory_;                // of the gradients: the lane of the rank's thread
  std::unique_ptr<Memory> lane_;  // of the thread below
  ProcessGroups& groups_;
  std::vector<GradientBucket> buckets_;
  CompressedReduction reduction_;
  std::unique_ptr<Communicator> dense_, experts_;  // of the thread
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::packaged_task<void()>> tasks_;  // guarded, as is busy_
  bool busy_ = false;
  std::jthread thread_;
};

}  // namespace tandem

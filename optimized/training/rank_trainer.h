// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include "optimized/anomaly/guard.h"
#include "optimized/anomaly/skip_list.h"
#include "optimized/checkpoint/checkpointer.h"
#include "optimized/data_pipeline/prefetcher.h"
#include "optimized/recovery/memory_tier.h"
#include "optimized/training/trainer.h"

namespace tandem {

/// Where the ranks of one process get their batches: the data, with its planted garbage, without the batches that are left out.
struct RunData {
  RunData(const TrainOptions& options, const std::optional<CheckpointInfo>& resumed, int consumers);

  std::unique_ptr<BatchSource> poisoned;  ///< null: nothing is planted
  SkippingSource source;
  Prefetcher batches;
};

/// The training loop of one rank. Rank 0 writes to the report; the others only to their own element of its vectors.
class RankTrainer {
 public:
  /// Borrows everything. Collective.
  RankTrainer(const TrainOptions& options, const std::optional<CheckpointInfo>& resumed, RunData& data, Communicator& comm,
              TrainReport& report);
  void run();

 private:
  // Of all ranks alike.
  enum class Next : std::uint8_t { go_on, back, end };

  [[nodiscard]] RankContext context();
  [[nodiscard]] EngineOptions engine_options();
  [[nodiscard]] CheckpointerOptions checkpointer_options() const;
  [[nodiscard]] std::unique_ptr<AnomalyGuard> make_guard(std::int64_t first_step);
  [[nodiscard]] bool leads() const { return comm_.rank() == 0; }
  [[nodiscard]] bool watches() const { return guard_ != nullptr; }
  [[nodiscard]] CheckpointInfo info(std::int64_t done) const;
  void enter(RunPhase phase);

  [[nodiscard]] std::int64_t start();
  [[nodiscard]] Next after(std::int64_t done);
  [[nodiscard]] Next obey(AnomalyDecision decision);
  [[nodiscard]] AnomalyDecision one_step(std::int64_t step);
  [[nodiscard]] StepResult compute(const Batch& batch, std::int64_t step);
  void record(std::int64_t step, const StepResult& result, double seconds, const std::vector<Span>& spans);
  [[nodiscard]] StepMetrics metrics_of(std::int64_t step, const StepResult& result, double seconds) const;
  void tell_metrics();
  void evaluate(std::int64_t done);
  [[nodiscard]] bool should_stop();
  [[nodiscard]] std::set<std::int64_t> worth_keeping() const;
  [[nodiscard]] AnomalyDecision save(std::int64_t done);
  void keep_in_memory(std::int64_t done);
  void wait_for_all();
  [[nodiscard]] std::int64_t roll_back();
  void load(std::int64_t step);
  void refused(std::int64_t done);
  void tell_problem(const std::string& problem);
  void report_checkpoints();
  void report_incidents();
  void keep_timings();
  void finish();

  const TrainOptions& options_;
  const std::optional<CheckpointInfo>& resumed_;
  RunData& data_;
  std::unique_ptr<SpanObserver> observer_;  // null: no profiler can look; the timeline borrows it
  Timeline timeline_;
  std::unique_ptr<Communicator> disturbed_;  // null: the network is as it is
  Communicator& comm_;                       // records in timeline_
  TrainReport& report_;
  ProgressSlot* progress_;
  std::unique_ptr<Kernels> kernels_;
  Arena arena_;
  Engine engine_;
  Checkpointer checkpointer_;
  std::unique_ptr<AnomalyGuard> guard_;  // null: nobody looks
  std::unique_ptr<MemoryTier> memory_;   // null: none
  bool last_is_refused_ = false;         // the last checkpoint that was due: its state is not sound
  std::size_t problems_told_ = 0;
  std::string memory_problem_;
  std::size_t timed_ = 0;  // checkpoints whose times are written, or never will be
  std::size_t told_ = 0;   // incidents
  std::size_t spans_seen_ = 0;
  std::int64_t skipped_steps_ = 0;
  std::optional<std::pair<StepMetrics, std::vector<Span>>> untold_;  // of the last step
};

}  // namespace tandem

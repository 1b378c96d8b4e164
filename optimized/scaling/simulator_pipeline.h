// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/pipeline_layout.h"
#include "optimized/pipeline_parallel/schedule.h"

namespace tandem {

/// What a pipeline is played with. Stages are global, as PipelineLayout counts them.
struct PipelineTimes {
  std::vector<double> forward, backward_input, backward_weight;  ///< [stages] seconds of a slot
  std::vector<double> hop;    ///< [stages - 1] seconds of a message between a stage and the next, either way
  bool sender_waits = false;  ///< a rank that sends goes on only when the message has arrived
};

struct PipelinePlay {
  std::vector<double> rank_end;  ///< [ranks] end of the rank's last slot; "zb-2p": since the start of its first one
  std::vector<double> rank_end_with_free_messages;  ///< the same played with messages that take no time
  std::vector<double> stage_end;                    ///< [stages] end of the stage's last slot
  [[nodiscard]] double end() const;
};

/// Every rank works through its slots in their order, each as soon as what it needs has arrived.
///
/// Where there are many micro-batches, a shorter schedule of the same form is played, and each end moved on by the period for
/// each micro-batch that was left out. This is exact: the times at which micro-batches pass a stage follow a recurrence that
/// reaches back no further than the micro-batches in flight. When, over that many of them, each time exceeds the one a period
/// before by the same number on every stage, it does so for ever. Where this is not seen the schedule is played in full.
[[nodiscard]] PipelinePlay play_pipeline(const PipelineConfig& config, const PipelineLayout& layout, int micro_batches,
                                         const PipelineTimes& times);
/// Without that: for tests.
[[nodiscard]] PipelinePlay play_whole_pipeline(const PipelineConfig& config, const PipelineLayout& layout, int micro_batches,
                                               const PipelineTimes& times);

}  // namespace tandem

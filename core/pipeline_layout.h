// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/plan.h"

namespace tandem {

/// Where the model's layers lie. A *stage* is a run of consecutive layers; stage 0 also holds the embedding, the last one the
/// head. Pipeline rank p of P holds `chunks` stages: chunk c is stage c * P + p (wrapped), or under zb-v stage p for chunk 0 and
/// 2 P - 1 - p for chunk 1, so that the first and the last stage are on the same rank.
struct PipelineLayout {
  int ranks = 1;
  int chunks = 1;
  bool v_shaped = false;
  std::vector<Interval> layers;  ///< [ranks * chunks] of each stage

  [[nodiscard]] int stages() const noexcept { return ranks * chunks; }
  [[nodiscard]] int stage_of(int pipeline_rank, int chunk) const;
  [[nodiscard]] int rank_of_stage(int stage) const;
  [[nodiscard]] int chunk_of_stage(int stage) const;
  [[nodiscard]] bool holds_embedding(int pipeline_rank) const { return rank_of_stage(0) == pipeline_rank; }
  [[nodiscard]] bool holds_head(int pipeline_rank) const { return rank_of_stage(stages() - 1) == pipeline_rank; }
};

/// The layout of a plan that conflicts() accepts.
[[nodiscard]] PipelineLayout pipeline_layout(const TrainingPlan& plan, const GptConfig& model);

/// "3-2-2-1" as numbers; nothing where the text is not of that form.
[[nodiscard]] std::optional<std::vector<int>> parse_stage_layers(const std::string& text);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "core/pipeline_layout.h"

#include <charconv>

namespace tandem {

int PipelineLayout::stage_of(int pipeline_rank, int chunk) const {
  if (v_shaped) return chunk == 0 ? pipeline_rank : 2 * ranks - 1 - pipeline_rank;
  return chunk * ranks + pipeline_rank;
}

int PipelineLayout::rank_of_stage(int stage) const {
  if (v_shaped) return stage < ranks ? stage : 2 * ranks - 1 - stage;
  return stage % ranks;
}

int PipelineLayout::chunk_of_stage(int stage) const { return stage / ranks; }

PipelineLayout pipeline_layout(const TrainingPlan& plan, const GptConfig& model) {
  PipelineLayout layout{plan.parallel.pipeline, plan.pipeline.chunks, plan.pipeline.schedule == "zb-v", {}};
  const auto listed = parse_stage_layers(plan.pipeline.stage_layers);
  std::int64_t begin = 0;
  for (int stage = 0; stage < layout.stages(); ++stage) {
    if (!listed || listed->empty()) {
      layout.layers.push_back(balanced_part(model.layers, layout.stages(), stage));
    } else {
      const std::int64_t end = begin + listed->at(static_cast<std::size_t>(stage));
      layout.layers.push_back({begin, end});
      begin = end;
    }
  }
  return layout;
}

std::optional<std::vector<int>> parse_stage_layers(const std::string& text) {
  std::vector<int> counts;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    int count = 0;
    const auto [next, error] = std::from_chars(at, end, count);
    if (error != std::errc() || *at == '-') return std::nullopt;
    counts.push_back(count);
    at = next;
    if (at == end) break;
    if (*at != '-' || at + 1 == end) return std::nullopt;
    ++at;
  }
  return counts;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// What a pass over a block computes in which order, and where the stages of the pipeline lie.
#include <algorithm>

#include "core/step_program_check.h"

namespace tandem::step_program_check {
namespace {

bool is_summed_product(Phase phase, Part part) {
  if (part == Part::mlp) return true;
  return part == (phase == Phase::forward ? Part::attention_out : Part::attention_in);
}

std::vector<Part> block_parts(bool experts) {
  std::vector<Part> parts = {Part::norm_1,        Part::attention_in,    Part::attention_core,
                             Part::attention_out, Part::attention_merge, Part::norm_2};
  if (experts) {
    parts.insert(parts.end(), {Part::router, Part::dispatch, Part::experts, Part::combine});
  } else {
    parts.push_back(Part::mlp);
  }
  parts.push_back(Part::mlp_merge);
  return parts;
}

}  // namespace

std::vector<Step> block_steps(const RankExpectation& expectation, int layer, Phase phase, int micro_batch) {
  std::vector<Part> parts = block_parts(expectation.experts);
  if (phase != Phase::forward) std::reverse(parts.begin(), parts.end());
  std::vector<Step> steps;
  for (const Part part : parts) {
    int pieces = part == Part::attention_core ? expectation.ring_steps : 1;
    const bool in_pieces = !expectation.product_pieces.empty() && is_summed_product(phase, part);
    if (in_pieces) pieces = expectation.product_pieces.at(static_cast<std::size_t>(micro_batch));
    for (int piece = 0; piece < pieces; ++piece) steps.push_back({part, layer, piece, in_pieces});
  }
  return steps;
}

int StageMap::stages(int rank) const {
  int count = 0;
  for (const int member : expectation_.group(GroupAxis::pipeline, rank)) {
    count += static_cast<int>(expectation_.ranks.at(static_cast<std::size_t>(member)).chunk_layers.size());
  }
  return count;
}

int StageMap::stage_of(int rank, int chunk) const {
  const std::vector<int>& given = expectation_.ranks.at(static_cast<std::size_t>(rank)).chunk_stages;
  if (!given.empty()) return given.at(static_cast<std::size_t>(chunk));
  const std::vector<int> group = expectation_.group(GroupAxis::pipeline, rank);
  const auto place = std::find(group.begin(), group.end(), rank) - group.begin();
  return chunk * static_cast<int>(group.size()) + static_cast<int>(place);
}

int StageMap::holder(int rank, int stage) const {
  for (const int member : expectation_.group(GroupAxis::pipeline, rank)) {
    const auto chunks = static_cast<int>(expectation_.ranks.at(static_cast<std::size_t>(member)).chunk_layers.size());
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (stage_of(member, chunk) == stage) return member;
    }
  }
  return -1;
}

}  // namespace tandem::step_program_check

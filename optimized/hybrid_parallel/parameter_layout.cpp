// SPDX-License-Identifier: Apache-2.0
#include "optimized/hybrid_parallel/parameter_layout.h"

#include <algorithm>

#include "core/pipeline_layout.h"
#include "optimized/tensor_parallel/vocabulary_loss.h"

namespace tandem {
namespace {

// Part `index` of an extent that `parts` divides.
Interval even_part(std::int64_t extent, int parts, int index) {
  const std::int64_t size = extent / parts;
  return {index * size, (index + 1) * size};
}

class Layout {
 public:
  Layout(const GptConfig& model, const TrainingPlan& plan, const ProcessGrid& grid, int rank)
      : model_(model), plan_(plan), stages_(pipeline_layout(plan, model)), here_(grid.coordinates(rank)) {}

  std::vector<LocalParameter> run() {
    std::vector<LocalParameter> dense;
    std::vector<LocalParameter> experts;
    for (const ParameterSpec& spec : gpt_parameters(model_)) {
      if (!is_here(spec)) continue;
      (spec.expert >= 0 ? experts : dense).push_back(local(spec));
    }
    dense.insert(dense.end(), experts.begin(), experts.end());
    return dense;
  }

 private:
  [[nodiscard]] bool holds_layer(int layer) const {
    for (int chunk = 0; chunk < stages_.chunks; ++chunk) {
      const Interval layers = stages_.layers[static_cast<std::size_t>(stages_.stage_of(here_.pipeline, chunk))];
      if (layer >= layers.begin && layer < layers.end) return true;
    }
    return false;
  }

  [[nodiscard]] bool is_here(const ParameterSpec& spec) const {
    if (spec.expert >= 0 && spec.expert / (model_.experts / plan_.parallel.expert) != here_.data % plan_.parallel.expert)
      return false;
    if (spec.layer >= 0) return holds_layer(spec.layer);
    const bool first = stages_.holds_embedding(here_.pipeline);
    const bool last = stages_.holds_head(here_.pipeline);
    if (spec.kind == ParameterKind::token_embedding) return first || (last && model_.tied);
    return spec.kind == ParameterKind::position_embedding ? first : last;
  }

  // Cuts the dimensions that tensor ranks share; false where the parameter is replicated on all of them.
  bool cut(const ParameterSpec& spec, ShardSpec& shard) const {
    const int ranks = plan_.parallel.tensor;
    const int rank = here_.tensor;
    const bool of_vocabulary = spec.kind == ParameterKind::token_embedding || spec.name == "lm_head.weight";
    if (of_vocabulary) {
      const Interval rows = vocabulary_part(model_.vocabulary, ranks, rank);
      shard.slices[0] = {rows};
      shard.padded_rows = padded_vocabulary(model_.vocabulary, ranks) / ranks - rows.size();
      return true;
    }
    const auto ends = [&](std::string_view end) { return spec.name.ends_with(end); };
    const std::size_t last = spec.shape.size() - 1;
    if (ends("attn.c_attn.weight") || ends("attn.c_attn.bias")) {
      const Interval heads = even_part(model_.hidden, ranks, rank);
      shard.slices[last].clear();
      for (std::int64_t third = 0; third < 3; ++third) {
        shard.slices[last].push_back({third * model_.hidden + heads.begin, third * model_.hidden + heads.end});
      }
      return true;
    }
    if (ends("c_fc.weight") || ends("c_fc.bias")) {
      shard.slices[last] = {even_part(model_.mlp_width(), ranks, rank)};
      return true;
    }
    if (ends("c_proj.weight")) {
      shard.slices[0] = {even_part(spec.shape[0], ranks, rank)};
      return true;
    }
    return false;
  }

  [[nodiscard]] bool is_tensor_partial(const ParameterSpec& spec) const {
    if (plan_.parallel.tensor == 1) return false;
    if (spec.kind == ParameterKind::router) return true;
    return plan_.sequence_parallel && spec.expert < 0;
  }

  LocalParameter local(const ParameterSpec& spec) const {
    LocalParameter result;
    result.spec = spec;
    result.shard = whole(spec.name, spec.shape, plan_.numerics.storage);
    const bool tensor_sharded = plan_.parallel.tensor > 1 && cut(spec, result.shard);
    result.tensor_partial_gradient = !tensor_sharded && is_tensor_partial(spec);
    const bool two_ends = stages_.rank_of_stage(0) != stages_.rank_of_stage(stages_.stages() - 1);
    result.tied_copy = model_.tied && two_ends && spec.kind == ParameterKind::token_embedding;
    // Copies, slowest first: end of the pipeline, tensor rank, data rank, context rank.
    const int copies = result.tied_copy ? 2 : 1;
    const int copy = result.tied_copy && !stages_.holds_embedding(here_.pipeline) ? 1 : 0;
    const int tensor_copies = tensor_sharded ? 1 : plan_.parallel.tensor;
    const int tensor_copy = tensor_sharded ? 0 : here_.tensor;
    const int groups = spec.expert >= 0 ? plan_.parallel.expert : 1;  // data ranks of different experts are no replicas
    const int data_copies = plan_.parallel.data / groups;
    const int data_copy = here_.data / groups;
    result.shard.replica_count = copies * tensor_copies * data_copies * plan_.parallel.context;
    result.shard.replica_index =
        ((copy * tensor_copies + tensor_copy) * data_copies + data_copy) * plan_.parallel.context + here_.context;
    result.counts_in_norm = copy == 0 && tensor_copy == 0;
    return result;
  }

  const GptConfig& model_;
  const TrainingPlan& plan_;
  PipelineLayout stages_;
  Coordinates here_;
};

}  // namespace

std::vector<LocalParameter> local_parameters(const GptConfig& model, const TrainingPlan& plan, const ProcessGrid& grid,
                                             int rank) {
  return Layout(model, plan, grid, rank).run();
}

}  // namespace tandem

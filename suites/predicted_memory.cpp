// SPDX-License-Identifier: Apache-2.0
// Closed forms of what a rank holds; docs/measuring.md writes them out.
#include <algorithm>
#include <cmath>
#include <map>

#include "optimized/data_parallel/compressed_sync.h"
#include "optimized/engine/layout.h"
#include "optimized/engine/lower.h"
#include "optimized/zero/host_offload.h"
#include "optimized/zero/ownership.h"
#include "suites/benefits.h"

namespace tandem {
namespace {

std::size_t index_of(MemoryCategory category) { return static_cast<std::size_t>(category); }

// Bytes of one block and token, by how long they live. Under sequence parallelism the residual stream and the norms' statistics
// exist for a tensor rank's slice of the tokens alone; the norms' outputs are whole.
struct BlockBytes {
  double cheap = 0;   // outputs of norms and of GELU, materialized attention probabilities
  double inside = 0;  // everything else but the output
  double out = 0;
};

BlockBytes block_bytes(const GptConfig& model, const TrainingPlan& plan, const MicroBatchShape& shape) {
  const double tensor = plan.parallel.tensor;
  const double slices = plan.sequence_parallel ? tensor : 1;
  const auto hidden = static_cast<double>(model.hidden);
  const auto width = static_cast<double>(model.mlp_width());
  const auto element = static_cast<double>(size_bytes(plan.numerics.storage));
  const auto statistic = static_cast<double>(size_bytes(wide(plan.numerics.storage)));
  const double heads = model.heads / tensor;
  const bool materialized = plan.attention == "materialized";
  BlockBytes bytes;
  bytes.cheap = element * (2 * hidden + (materialized ? heads * static_cast<double>(shape.row_tokens) : 0));
  bytes.inside = element * (4 * hidden / tensor + hidden / slices) + statistic * (4 / slices + (materialized ? 0 : heads));
  bytes.out = element * hidden / slices;
  if (model.experts == 0) {
    bytes.cheap += element * width / tensor;
    bytes.inside += element * width / tensor;
    return bytes;
  }
  // Places at experts, over the tokens that this rank has.
  const auto tokens = static_cast<double>(std::max<std::int64_t>(1, shape.tokens()));
  const double per_row = static_cast<double>(std::min(model.expert_capacity(shape.row_tokens), shape.sequence));
  double rows = 0;
  for (const std::int64_t peer : shape.peer_rows) rows += static_cast<double>(peer);
  const double received = model.experts / plan.parallel.expert * rows * per_row / tokens;
  const double own = model.experts * static_cast<double>(shape.rows) * per_row / tokens;
  bytes.cheap += element * received * width / tensor;
  bytes.inside += element * (received * (hidden + width / tensor) + own * hidden) +
                  statistic * static_cast<double>(model.experts + model.expert_choices);
  return bytes;
}

// Of a stage, per token: what lives from its forward to its backward pass, and what exists while one group of layers is computed
// again.
struct StageBytes {
  double kept = 0;
  double again = 0;
};

StageBytes stage_bytes(const GptConfig& model, const TrainingPlan& plan, const MicroBatchShape& shape, Interval layers) {
  const BlockBytes block = block_bytes(model, plan, shape);
  StageBytes stage;
  stage.kept = block.out;  // what enters
  // Where weight parts are put off, what they need is kept until then: all of it, whatever was computed again.
  if (plan.pipeline.schedule.starts_with("zb-")) {
    stage.kept += static_cast<double>(layers.size()) * (block.cheap + block.inside + block.out);
    return stage;
  }
  double group = 0;
  for (auto layer = static_cast<int>(layers.begin); layer < layers.end; ++layer) {
    const BlockStorage storage = block_storage(plan.recompute, layers, layer);
    stage.kept += (storage.cheap ? block.cheap : 0) + (storage.inside ? block.inside : 0) + (storage.out ? block.out : 0);
    group += (storage.cheap ? 0 : block.cheap) + (storage.inside ? 0 : block.inside) + (storage.out ? 0 : block.out);
    stage.again = std::max(stage.again, group);
    if (storage.out) group = 0;
  }
  return stage;
}

// The first data rank and its first micro-batch are the largest (balanced_part).
double activation_bytes(const GptConfig& model, const TrainingPlan& plan, const ProcessGrid& grid, std::int64_t sequence,
                        int rank, int in_flight) {
  const MicroBatchShape shape = micro_batch_shape(local_model(model, plan, grid, rank), plan.batch, sequence, 0);
  const double slices = plan.sequence_parallel ? plan.parallel.tensor : 1;
  const PipelineLayout stages = pipeline_layout(plan, model);
  const int here = grid.coordinates(rank).pipeline;
  StageBytes largest;
  for (int c = 0; c < stages.chunks; ++c) {
    const Interval layers = stages.layers[static_cast<std::size_t>(stages.stage_of(here, c))];
    const StageBytes chunk = stage_bytes(model, plan, shape, layers);
    largest = {std::max(largest.kept, chunk.kept), std::max(largest.again, chunk.again)};
  }
  // Of the head, one micro-batch's is kept at a time, unless all forward passes come first. It is gone before blocks are computed
  // again, the others' apart.
  const auto element = static_cast<double>(size_bytes(plan.numerics.storage));
  const auto statistic = static_cast<double>(size_bytes(wide(plan.numerics.storage)));
  const double head = stages.holds_head(here) ? element * static_cast<double>(model.hidden) + statistic * 2 / slices : 0;
  const double more_heads = plan.pipeline.schedule == "gpipe" ? (plan.batch.micro_batches - 1) * head : 0;
  return static_cast<double>(shape.tokens()) * (in_flight * largest.kept + more_heads + std::max(head, largest.again));
}

// Sizes of the units that are dealt to several ranks, in elements: those of a block together, by layer, and the others.
struct DealtUnits {
  std::map<int, std::int64_t> blocks;
  std::int64_t tokens = 0, positions = 0, norm = 0, head = 0;
};

DealtUnits dealt_units(const std::vector<LocalParameter>& parameters, const Ownership& owned) {
  DealtUnits dealt;
  for (std::size_t u = 0; u < owned.units.size(); ++u) {
    if (owned.ranks[u] == 1) continue;
    const ParameterSpec& first = parameters[static_cast<std::size_t>(owned.units[u].parameters.begin)].spec;
    const std::int64_t elements = owned.units[u].elements.size();
    if (first.layer >= 0) {
      dealt.blocks[first.layer] += elements;
    } else if (first.kind == ParameterKind::token_embedding) {
      dealt.tokens = elements;
    } else if (first.kind == ParameterKind::position_embedding) {
      dealt.positions = elements;
    } else {
      (first.kind == ParameterKind::norm_weight ? dealt.norm : dealt.head) = elements;
    }
  }
  return dealt;
}

// Most elements that are gathered at once: a block and the next one that is on its way (with full recomputation a whole group of
// layers), or what an end of the model reads.
std::int64_t gathered_elements(const GptConfig& model, const TrainingPlan& plan, const DealtUnits& dealt, Interval layers) {
  const int ahead = plan.overlap.prefetch ? 2 : 1;
  const std::int64_t window = plan.recompute.mode == "full" ? std::max(ahead, plan.recompute.layers) : ahead;
  std::int64_t most = std::max(dealt.tokens + dealt.positions, dealt.norm + (model.tied ? dealt.tokens : dealt.head));
  for (std::int64_t first = layers.begin; first < layers.end; ++first) {
    std::int64_t together = 0;
    for (std::int64_t layer = first; layer < std::min(layers.end, first + window); ++layer) {
      const auto found = dealt.blocks.find(static_cast<int>(layer));
      together += found == dealt.blocks.end() ? 0 : found->second;
    }
    most = std::max(most, together);
  }
  return most;
}

// Most elements of gradients that exist whole at once. A tied table on one rank has its gradient from the head to the embedding.
std::int64_t opened_elements(const GptConfig& model, const DealtUnits& dealt, bool both_ends) {
  std::int64_t block = std::max(dealt.positions, dealt.norm);
  for (const auto& [layer, elements] : dealt.blocks) block = std::max(block, elements);
  if (model.tied && both_ends) return dealt.tokens + block;
  return std::max({block, dealt.tokens + dealt.positions, dealt.head});
}

int optimizer_tensors(const TrainingPlan& plan, OptimizerKind optimizer) {
  return (optimizer == OptimizerKind::adamw ? 2 : 0) + (plan.numerics.has_master_copy() ? 1 : 0);
}

ProgramFacts program_facts(const GptConfig& model, const TrainingPlan& plan, std::int64_t sequence) {
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < plan.parallel.world_size(); ++rank) programs.push_back(lower(plan, model, sequence, rank));
  return check_programs(programs, expectation(plan, model, sequence));
}

}  // namespace

MemoryForecast forecast_memory(const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, std::int64_t sequence) {
  MemoryForecast forecast;
  forecast.device = predicted_peak(model, plan, optimizer, sequence);
  const BytesByCategory programmed = program_facts(model, plan, sequence).peak_bytes_by_category;
  std::int64_t& workspace = forecast.device[index_of(MemoryCategory::workspace)];
  workspace = programmed[index_of(MemoryCategory::workspace)];
  // With several micro-batches in flight the closed form is an upper limit: not all of them are whole at once.
  std::int64_t& activations = forecast.device[index_of(MemoryCategory::activations)];
  activations = std::min(activations, programmed[index_of(MemoryCategory::activations)]);
  if (plan.offload == "none") return forecast;
  const ProcessGrid grid(plan);
  for (int rank = 0; rank < grid.size(); ++rank) {
    const std::int64_t elements = ownership(local_parameters(model, plan, grid, rank), plan, grid, rank).elements;
    const std::int64_t element = optimizer_tensors(plan, optimizer) * static_cast<std::int64_t>(size_bytes(plan.numerics.master));
    std::int64_t& host = forecast.host[index_of(MemoryCategory::optimizer)];
    host = std::max(host, element * elements);
    // Two buffers, unless one chunk is all there is; other workspace is not in use then.
    const std::int64_t chunk = HostOffloadOptions{}.chunk_elements;
    workspace = std::max(workspace, element * (elements > chunk ? 2 * chunk : elements));
  }
  return forecast;
}

BytesByCategory predicted_peak(const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, std::int64_t sequence) {
  const ProcessGrid grid(plan);
  const ProgramFacts facts = program_facts(model, plan, sequence);
  const PipelineLayout stages = pipeline_layout(plan, model);
  const auto element_bytes = [](DType dtype) { return static_cast<std::int64_t>(size_bytes(dtype)); };
  BytesByCategory bytes{};
  for (int rank = 0; rank < grid.size(); ++rank) {
    const std::vector<LocalParameter> parameters = local_parameters(model, plan, grid, rank);
    const Ownership owned = ownership(parameters, plan, grid, rank);
    const DealtUnits dealt = dealt_units(parameters, owned);
    const std::int64_t all = owned.units.front().elements.end;  // units are in backward order, experts last in the flat one
    std::int64_t gathered = 0;
    for (int chunk = 0; chunk < stages.chunks; ++chunk) {
      const int stage = stages.stage_of(grid.coordinates(rank).pipeline, chunk);
      gathered = std::max(gathered, gathered_elements(model, plan, dealt, stages.layers[static_cast<std::size_t>(stage)]));
    }
    const int here = grid.coordinates(rank).pipeline;
    const std::int64_t element = element_bytes(plan.numerics.accumulate);
    // With overlap a unit's gradients stay until the next one's are on their way, whichever that is: as the program says.
    const std::int64_t opened =
        plan.overlap.gradients ? facts.peak_bytes_by_category[index_of(MemoryCategory::gradients)]
                               : element * opened_elements(model, dealt, stages.holds_embedding(here) && stages.holds_head(here));
    const auto largest = [&](MemoryCategory category, std::int64_t value) {
      bytes[index_of(category)] = std::max(bytes[index_of(category)], value);
    };
    const int zero = plan.zero_stage;
    largest(MemoryCategory::parameters, element_bytes(plan.numerics.storage) * (zero >= 3 ? owned.elements + gathered : all));
    largest(MemoryCategory::gradients,
            zero >= 2 ? element * owned.elements + opened : element * all + compressed_state_bytes(plan, grid, rank, parameters));
    if (plan.offload == "none") {
      largest(MemoryCategory::optimizer,
              optimizer_tensors(plan, optimizer) * element_bytes(plan.numerics.master) * owned.elements);
    }
    largest(MemoryCategory::activations, std::llround(activation_bytes(model, plan, grid, sequence, rank,
                                                                       facts.peak_in_flight[static_cast<std::size_t>(rank)])));
  }
  return bytes;
}

}  // namespace tandem

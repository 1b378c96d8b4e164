// SPDX-License-Identifier: Apache-2.0
#include "suites/benefits.h"

#include <algorithm>

#include <fmt/format.h>

#include "optimized/engine/layout.h"
#include "optimized/engine/lower.h"

namespace tandem {
namespace {

std::size_t index_of(MemoryCategory category) { return static_cast<std::size_t>(category); }

// Elements of one block and token, by how long they live. Under sequence parallelism the residual stream and the norms'
// statistics exist for a tensor rank's slice of the tokens alone; the norms' outputs are whole.
struct BlockElements {
  double cheap = 0;   // outputs of norms and of GELU
  double inside = 0;  // everything else but the output
  double out = 0;
};

BlockElements block_elements(const GptConfig& model, const TrainingPlan& plan) {
  const double tensor = plan.parallel.tensor;
  const double slices = plan.sequence_parallel ? tensor : 1;
  const auto hidden = static_cast<double>(model.hidden);
  const auto width = static_cast<double>(model.mlp_width());
  return {2 * hidden + width / tensor, (4 * hidden + width + model.heads) / tensor + (hidden + 4) / slices, hidden / slices};
}

// Of a stage: what lives from its forward to its backward pass, and what exists while one group of layers is computed again.
struct StageElements {
  double kept = 0;
  double again = 0;
};

StageElements stage_elements(const GptConfig& model, const TrainingPlan& plan, Interval layers) {
  const BlockElements block = block_elements(model, plan);
  const double slices = plan.sequence_parallel ? plan.parallel.tensor : 1;
  StageElements stage;
  stage.kept = static_cast<double>(model.hidden) / slices;  // what enters
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

struct RankPeak {
  double state_elements = 0;
  double activation_elements = 0;
};

// The first data rank and its first micro-batch are the largest (balanced_part).
RankPeak peak_of_rank(const GptConfig& model, const TrainingPlan& plan, const ProcessGrid& grid, std::int64_t sequence, int rank,
                      int in_flight) {
  RankPeak peak;
  for (const LocalParameter& held : local_parameters(model, plan, grid, rank)) {
    peak.state_elements += static_cast<double>(held.num_elements());
  }
  const MicroBatchShape shape = micro_batch_shape(local_model(model, plan, grid, rank), plan.batch, sequence, 0);
  const double slices = plan.sequence_parallel ? plan.parallel.tensor : 1;
  const auto hidden = static_cast<double>(model.hidden);
  const PipelineLayout stages = pipeline_layout(plan, model);
  const int here = grid.coordinates(rank).pipeline;
  StageElements largest;
  for (int c = 0; c < stages.chunks; ++c) {
    const StageElements chunk = stage_elements(model, plan, stages.layers[static_cast<std::size_t>(stages.stage_of(here, c))]);
    largest = {std::max(largest.kept, chunk.kept), std::max(largest.again, chunk.again)};
  }
  // Where weight parts are put off, what they need is kept until then.
  if (plan.pipeline.schedule.starts_with("zb-")) largest = {largest.kept + largest.again, 0};
  // Of the head, one micro-batch's is kept at a time, unless all forward passes come first. It is gone before blocks are computed
  // again, the others' apart.
  const double head = stages.holds_head(here) ? hidden + 2 / slices : 0;
  const double more_heads = plan.pipeline.schedule == "gpipe" ? (plan.batch.micro_batches - 1) * head : 0;
  peak.activation_elements =
      static_cast<double>(shape.tokens()) * (in_flight * largest.kept + more_heads + std::max(head, largest.again));
  return peak;
}

}  // namespace

BytesByCategory predicted_peak(const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, std::int64_t sequence) {
  const auto element = static_cast<double>(size_bytes(plan.numerics.storage));
  const ProcessGrid grid(plan);
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < grid.size(); ++rank) programs.push_back(lower(plan, model, sequence, rank));
  const ProgramFacts facts = check_programs(programs, expectation(plan, model, sequence));
  BytesByCategory bytes{};
  for (int rank = 0; rank < grid.size(); ++rank) {
    const RankPeak peak = peak_of_rank(model, plan, grid, sequence, rank, facts.peak_in_flight[static_cast<std::size_t>(rank)]);
    const auto largest = [&](MemoryCategory category, double elements) {
      std::int64_t& most = bytes[index_of(category)];
      most = std::max(most, static_cast<std::int64_t>(elements * element));
    };
    largest(MemoryCategory::parameters, peak.state_elements);
    largest(MemoryCategory::gradients, peak.state_elements);
    largest(MemoryCategory::optimizer, optimizer == OptimizerKind::adamw ? 2 * peak.state_elements : 0);
    largest(MemoryCategory::activations, model.experts == 0 ? peak.activation_elements : 0);
  }
  return bytes;
}

std::int64_t predicted_gradient_bytes(const GptConfig& model, const TrainingPlan& plan) {
  const std::int64_t ranks = plan.parallel.data;
  return 2 * (ranks - 1) * num_parameters(model) * static_cast<std::int64_t>(size_bytes(plan.numerics.reduce));
}

std::vector<StepProgram> programs_of(const PairInputs& inputs) {
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < inputs.plan.parallel.world_size(); ++rank) {
    programs.push_back(lower(inputs.plan, inputs.model, inputs.data->sequence(), rank));
  }
  return programs;
}

ProgramFacts facts_of(const PairInputs& inputs) {
  return check_programs(programs_of(inputs), expectation(inputs.plan, inputs.model, inputs.data->sequence()));
}

Property proven_program(const PairInputs& inputs) {
  const ProgramFacts facts = facts_of(inputs);
  const std::string first = facts.problems.empty() ? "complete, ordered, free of deadlock" : facts.problems.front();
  return {"step_program_problems", static_cast<double>(facts.problems.size()), Relation::equal, 0.0, first, -1, ""};
}

std::int64_t bytes_sent(const Measured& measured, Purpose purpose) {
  std::int64_t sent = 0;
  for (const auto& spans : measured.spans_by_rank) {
    for (const Span& span : spans) {
      if (span.activity == Activity::transfer && span.purpose == purpose) sent += span.bytes;
    }
  }
  return sent;
}

Property sent_as_programmed(const PairInputs& inputs, const Measured& measured, Purpose purpose) {
  const std::int64_t programmed = facts_of(inputs).wire_bytes[static_cast<std::size_t>(purpose)] * inputs.steps;
  return {fmt::format("{}_bytes_on_the_wire", name(purpose)),
          static_cast<double>(bytes_sent(measured, purpose)),
          Relation::equal,
          static_cast<double>(programmed),
          "steps * the step programs' bytes_on_wire, all ranks",
          -1,
          ""};
}

Property activations_as_predicted(const PairInputs& inputs, const Measured& measured) {
  const std::size_t activations = index_of(MemoryCategory::activations);
  const std::vector<int> in_flight = facts_of(inputs).peak_in_flight;
  const double tensors = *std::max_element(in_flight.begin(), in_flight.end()) * 14.0 * inputs.model.layers + 4;
  return {"activation_bytes_per_rank",
          static_cast<double>(measured.peak_bytes[activations]),
          Relation::at_most,
          static_cast<double>(measured.predicted_peak_bytes[activations]) + 64 * tensors,
          fmt::format("64 bytes a tensor + in-flight micro-batches * (layers (2 h + (4 h + 2 f + heads) / t + (2 h + 4) / s) + h "
                      "/ s) * tokens, "
                      "t = {}, s = {}",
                      inputs.plan.parallel.tensor, inputs.plan.sequence_parallel ? inputs.plan.parallel.tensor : 1),
          -1,
          ""};
}

Property state_as_predicted(const PairInputs& inputs, const Measured& measured) {
  double measured_bytes = 0;
  double predicted = 0;
  for (const MemoryCategory category : {MemoryCategory::parameters, MemoryCategory::gradients, MemoryCategory::optimizer}) {
    measured_bytes += static_cast<double>(measured.peak_bytes[index_of(category)]);
    predicted += static_cast<double>(measured.predicted_peak_bytes[index_of(category)]);
  }
  const int copies = inputs.optimizer.kind == OptimizerKind::adamw ? 4 : 2;
  return {"state_bytes_per_rank",
          measured_bytes,
          Relation::at_most,
          predicted + 64.0 * copies,
          fmt::format("{} copies of the elements of the fullest rank's shards, each rounded up to 64 bytes", copies),
          -1,
          ""};
}

}  // namespace tandem

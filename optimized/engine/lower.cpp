// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/lower.h"

#include <algorithm>
#include <memory>

#include "core/pipeline_layout.h"
#include "optimized/data_parallel/buckets.h"
#include "optimized/engine/gradient_sources.h"
#include "optimized/engine/lowering.h"

namespace tandem {
namespace {

RankExpectation expectation_of(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, const ProcessGrid& grid,
                               int rank) {
  const PipelineLayout stages = pipeline_layout(plan, model);
  const int here = grid.coordinates(rank).pipeline;
  RankExpectation expected;
  for (int chunk = 0; chunk < stages.chunks; ++chunk) {
    expected.chunk_stages.push_back(stages.stage_of(here, chunk));
    expected.chunk_layers.push_back(stages.layers[static_cast<std::size_t>(expected.chunk_stages.back())]);
  }
  if (stages.holds_embedding(here)) expected.embedding_chunk = 0;
  if (stages.holds_head(here)) expected.head_chunk = stages.chunks - 1;
  expected.micro_batches = plan.batch.micro_batches;
  expected.ring_steps = plan.parallel.context;
  expected.experts = model.experts > 0;
  expected.zero_stage = plan.zero_stage;
  for (int micro_batch = 0; micro_batch < expected.micro_batches; ++micro_batch) {
    const LocalModel local = local_model(model, plan, grid, rank);
    const MicroBatchShape shape = micro_batch_shape(local, plan.batch, sequence, micro_batch);
    expected.product_pieces.push_back(product_pieces(local, shape, Phase::forward, Part::attention_out));
  }
  expected.head_pieces = head_pieces(micro_batch_shape(local_model(model, plan, grid, rank), plan.batch, sequence, 0));
  const std::vector<LocalParameter> parameters = local_parameters(model, plan, grid, rank);
  for (const GradientBucket& bucket : buckets_of(plan, parameters)) {
    const std::size_t replicas = grid.group(bucket.experts ? GroupAxis::expert_gradient : GroupAxis::gradient, rank).size();
    std::vector<int> sources;
    for (std::int64_t p = bucket.parameters.begin; p < bucket.parameters.end; ++p) {
      const auto more = gradient_sources(parameters[static_cast<std::size_t>(p)], expected.embedding_chunk >= 0,
                                         expected.head_chunk >= 0 && model.tied);
      sources.insert(sources.end(), more.begin(), more.end());
    }
    std::sort(sources.begin(), sources.end());
    sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
    expected.bucket_sources.push_back(std::move(sources));
    expected.bucket_is_reduced.push_back(replicas > 1);
    expected.bucket_is_expert.push_back(bucket.experts);
  }
  return expected;
}

}  // namespace

StepProgram lower(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, int rank, const PitfallSet& pitfalls) {
  return Lowering(plan, model, sequence, rank, pitfalls, Lowering::Kind::training_step).program();
}

StepProgram lower_evaluation(const TrainingPlan& plan, const GptConfig& model, std::int64_t rows, std::int64_t sequence,
                             int rank) {
  TrainingPlan forward = plan;
  forward.batch.rows = rows;
  return Lowering(forward, model, sequence, rank, {}, Lowering::Kind::evaluation).program();
}

ProgramExpectation expectation(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence) {
  const auto grid = std::make_shared<ProcessGrid>(plan);
  ProgramExpectation expected;
  for (int rank = 0; rank < grid->size(); ++rank) expected.ranks.push_back(expectation_of(plan, model, sequence, *grid, rank));
  expected.group = [grid](GroupAxis axis, int rank) { return grid->group(axis, rank); };
  return expected;
}

}  // namespace tandem

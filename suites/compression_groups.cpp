// SPDX-License-Identifier: Apache-2.0
#include "suites/compression_groups.h"

#include <cmath>

#include "core/process_grid.h"
#include "optimized/hybrid_parallel/parameter_layout.h"

namespace tandem {
namespace {

const CodedRecord& record_of(const CompressionStep& step, const ReducingGroup& group) {
  return step.tensors.at(group.tensor.name);
}

const CompressionStep& before_of(const CompressionRun& run, int rank, std::size_t index) {
  const auto r = static_cast<std::size_t>(rank);
  return index == 0 ? run.start[r] : run.steps[r][index - 1];
}

float times(float value, double factor) { return factor == 1 ? value : value * static_cast<float>(factor); }

Floats owned_sum(const std::vector<const CompressionStep*>& steps, const ReducingGroup& group, double factor) {
  Floats whole(static_cast<std::size_t>(group.tensor.num_elements()));
  for (const CompressionStep* step : steps) {
    const Floats& part = record_of(*step, group).sum_residual;
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (!std::isnan(part[i])) whole[i] = times(part[i], factor);
    }
  }
  return whole;
}

}  // namespace

std::vector<ReducingGroup> reducing_groups(const PairInputs& inputs) {
  const ProcessGrid grid(inputs.plan);
  std::vector<ReducingGroup> groups;
  for (int rank = 0; rank < grid.size(); ++rank) {
    for (const LocalParameter& parameter : local_parameters(inputs.model, inputs.plan, grid, rank)) {
      const std::vector<int> ranks = grid.group(parameter.expert() ? GroupAxis::expert_gradient : GroupAxis::gradient, rank);
      if (ranks.front() != rank || ranks.size() == 1) continue;
      const Shape shape = parameter.shard.local_shape();
      const std::int64_t rows = num_elements(shape) / shape.back() - parameter.shard.padded_rows;
      groups.push_back({{parameter.spec.name, rows, shape.back()}, ranks});
    }
  }
  return groups;
}

GroupStep group_step(const CompressionRun& run, const ReducingGroup& group, std::size_t index) {
  GroupStep result;
  const std::vector<CompressionStep>& first = run.steps[static_cast<std::size_t>(group.ranks.front())];
  const double factor = result.scale_factor = first[index].loss_scale / before_of(run, group.ranks.front(), index).loss_scale;
  const auto elements = static_cast<std::size_t>(group.tensor.num_elements());
  std::vector<const CompressionStep*> before, after;
  for (const int rank : group.ranks) {
    before.push_back(&before_of(run, rank, index));
    after.push_back(&run.steps[static_cast<std::size_t>(rank)][index]);
    result.gradient.push_back(record_of(*after.back(), group).before);
    Floats residual = record_of(*before.back(), group).residual;
    for (float& value : residual) value = times(value, factor);
    residual.resize(elements);
    result.residual_before.push_back(std::move(residual));
    result.residual.push_back(record_of(*after.back(), group).residual);
    result.residual.back().resize(elements);
  }
  result.sum = record_of(*after.front(), group).after;
  result.sum_residual_before = owned_sum(before, group, factor);
  result.sum_residual = owned_sum(after, group, 1);
  result.skipped = first[index].skipped;
  result.step = first[index].step;
  return result;
}

void for_each_group_step(const CompressionScript& script, const CompressionRun& run,
                         const std::function<void(const ReducingGroup&, const GroupStep&)>& use) {
  for (const ReducingGroup& group : reducing_groups(script.inputs)) {
    for (std::size_t i = 0; i < run.steps.front().size(); ++i) use(group, group_step(run, group, i));
  }
}

}  // namespace tandem

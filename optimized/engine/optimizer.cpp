// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

namespace tandem {
namespace {

// The gradient's parts whose squares are summed, one kernel call for all, and which partial each belongs to.
struct PartialSums {
  std::vector<TensorView> tensors;
  std::vector<double*> into;  // of an entry of NormPartials; stays valid while tensors are collected
};

// Of the elements `range` of a unit, whose values are `values`.
void collect(const RankContext& context, const ParameterStore& store, const GradientBucket& unit, Interval range,
             TensorView values, double& partial, double& uncounted, PartialSums& sums) {
  // Replicated parameters must count once: every tensor rank has the same norms and row biases.
  const bool every_copy = context.pitfalls.on(Pitfall::replicated_counted_per_tensor_rank);
  std::int64_t begin = 0;  // of a tensor, in the unit
  for (std::int64_t p = unit.parameters.begin; p < unit.parameters.end; ++p) {
    const LocalParameter& parameter = store.parameters()[static_cast<std::size_t>(p)];
    const std::int64_t first = std::max(begin, range.begin);
    const std::int64_t last = std::min(begin + parameter.num_elements(), range.end);
    begin += parameter.num_elements();
    if (first >= last) continue;
    sums.tensors.push_back(values.flat(first - range.begin, last - first));
    sums.into.push_back(parameter.counts_in_norm || every_copy ? &partial : &uncounted);
  }
}

// `partials`: of this unit, one for each of its parts.
void collect_parts(const RankContext& context, const ParameterStore& store, int unit_index, std::span<double> partials,
                   double& uncounted, PartialSums& sums) {
  const GradientBucket& unit = store.units()[static_cast<std::size_t>(unit_index)];
  const bool dealt = store.ranks_of(unit_index) > 1;
  // After a reduce-scatter only the owned part is a sum; the rest of the buffer, where there is one, is what this rank put in.
  const bool all_parts = context.pitfalls.on(Pitfall::norm_over_unowned_gradients) && store.keeps_whole_gradients();
  const auto parts = static_cast<int>(partials.size());
  for (int part = 0; part < parts; ++part) {
    const Interval range = balanced_part(unit.elements.size(), parts, part);
    double& partial = partials[static_cast<std::size_t>(part)];
    if (!dealt || all_parts) {
      const TensorView values = store.unit_gradients(unit_index).flat(range.begin, range.size());
      collect(context, store, unit, range, values, partial, uncounted, sums);
    } else if (range == store.owned(unit_index)) {
      collect(context, store, unit, range, store.owned_gradients(unit_index), partial, uncounted, sums);
    }
  }
}

}  // namespace

double scheduled_learning_rate(const OptimizerConfig& optimizer, const ScheduleConfig& schedule, std::int64_t position,
                               std::int64_t total_steps) {
  if (position < schedule.warmup_steps) {
    return optimizer.learning_rate * static_cast<double>(position + 1) / static_cast<double>(schedule.warmup_steps);
  }
  if (schedule.kind == ScheduleKind::constant) return optimizer.learning_rate;
  const std::int64_t decay_steps = schedule.decay_steps > 0 ? schedule.decay_steps : total_steps;
  const auto length = static_cast<double>(std::max<std::int64_t>(1, decay_steps - schedule.warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(position - schedule.warmup_steps) / length);
  const double cosine = (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
  return optimizer.learning_rate * (schedule.min_ratio + (1.0 - schedule.min_ratio) * cosine);
}

double NormPartials::share(int expert_rank) const {
  const double of_dense = expert_rank == 0 ? std::accumulate(dense.begin(), dense.end(), 0.0) : 0.0;
  return std::accumulate(experts.begin(), experts.end(), of_dense);
}

NormPartials norm_partials(const RankContext& context, const ProcessGroups& groups, const ParameterStore& store) {
  NormPartials partials;
  std::size_t dense = 0, experts = 0;
  for (const GradientBucket& unit : store.units()) {
    (unit.experts ? experts : dense) += static_cast<std::size_t>(groups.size(unit.axis()));
  }
  partials.dense.resize(dense);
  partials.experts.resize(experts);
  std::span<double> dense_left = partials.dense, experts_left = partials.experts;
  PartialSums sums;
  for (std::size_t u = 0; u < store.units().size(); ++u) {
    const GradientBucket& unit = store.units()[u];
    std::span<double>& left = unit.experts ? experts_left : dense_left;
    const auto parts = static_cast<std::size_t>(groups.size(unit.axis()));
    collect_parts(context, store, static_cast<int>(u), left.first(parts), partials.uncounted, sums);
    left = left.subspan(parts);
  }
  std::vector<double> squares(sums.tensors.size());
  context.kernels->squared_norms(sums.tensors, squares);
  for (std::size_t i = 0; i < squares.size(); ++i) *sums.into[i] += squares[i];
  return partials;
}

NormPartialCounts norm_partial_counts(const std::vector<LocalParameter>& parameters, int gradient_ranks,
                                      int expert_gradient_ranks) {
  NormPartialCounts counts;
  for (const GradientBucket& unit : parameter_units(parameters)) {
    unit.experts ? counts.experts += expert_gradient_ranks : counts.dense += gradient_ranks;
  }
  return counts;
}

double clip_coefficient(const OptimizerConfig& config, double norm, const PitfallSet& pitfalls) {
  if (config.max_grad_norm == 0.0 || pitfalls.on(Pitfall::clipping_dropped)) return 1.0;
  // The epsilon is part of the definition: without it runs differ by up to 1e-6 / norm from those of other programs.
  const double epsilon = pitfalls.on(Pitfall::clip_without_epsilon) ? 0.0 : kClipEpsilon;
  const double coefficient = config.max_grad_norm / (norm + epsilon);
  return coefficient < 1.0 ? coefficient : std::isnan(coefficient) ? coefficient : 1.0;
}

namespace {

// Planted: the last elements of a unit that do not divide evenly belong to nobody.
Interval without_remainder(const ParameterStore& store, const OwnedPart& part) {
  const std::int64_t ranks = store.ranks_of(part.unit);
  const GradientBucket& unit = store.units()[static_cast<std::size_t>(part.unit)];
  const bool is_last = part.parameter + 1 == static_cast<std::size_t>(unit.parameters.end);
  const std::int64_t whole = store.parameters()[part.parameter].num_elements();
  const std::int64_t divided = is_last ? whole - unit.elements.size() % ranks : whole;
  return {0, std::max<std::int64_t>(0, std::min(part.elements.end, divided) - part.elements.begin)};
}

}  // namespace

namespace {

// What is updated of one part: `range` of its elements, with the optimizer's state for them.
struct PartState {
  Interval range;
  TensorView master, first_moment, second_moment;
};

// AdamW is added to `adamw`, for one call of all.
void update_part(const RankContext& context, const OptimizerConfig& config, const ParameterUpdate& update,
                 const ParameterStore& store, const OwnedPart& part, const PartState& state, std::vector<AdamWTensors>& adamw) {
  Kernels& k = *context.kernels;
  const LocalParameter& held = store.parameters()[part.parameter];
  // Biases and norms do not decay: pulling a norm's weight towards zero fights what it is for.
  const bool decays = held.spec.decays() || context.pitfalls.on(Pitfall::decay_on_every_tensor);
  const double decay = decays ? config.weight_decay : 0.0;
  // One coefficient for all ranks: replicas that are clipped on one rank alone part.
  const bool unclipped =
      context.pitfalls.on(Pitfall::replicated_clipped_on_tensor_rank_zero) && update.tensor_rank > 0 && held.shard.is_whole();
  const double scale = unclipped ? 1.0 : update.gradient_scale;
  const auto in = [&](TensorView values) { return values.flat(state.range.begin, state.range.size()); };
  const TensorView stored = store.has_master_copy() ? in(store.stored(part)) : TensorView();
  // The sum must not start from 16 bits: updates below half a unit in the last place are lost.
  if (stored && context.pitfalls.on(Pitfall::update_in_storage_precision)) k.convert(stored, state.master);
  if (config.kind == OptimizerKind::sgd) {
    k.sgd(update.learning_rate, decay, scale, in(store.gradient(part)), state.master, stored);
    return;
  }
  const AdamWStep step = {update.learning_rate, config.beta1, config.beta2, config.epsilon, decay, update.index, scale};
  adamw.push_back({step, in(store.gradient(part)), state.master, state.first_moment, state.second_moment, stored});
}

void update_offloaded(const RankContext& context, const OptimizerConfig& config, const ParameterUpdate& update,
                      ParameterStore& store) {
  std::vector<Interval> segments;
  for (const OwnedPart& part : store.parts()) segments.push_back({part.at, part.at + part.elements.size()});
  const auto use = [&](const OffloadedPart& chunk) {
    const OwnedPart& part = store.parts()[chunk.segment];
    PartState state{{chunk.elements.begin - part.at, chunk.elements.end - part.at}, {}, {}, {}};
    std::size_t next = 0;
    state.master =
        store.has_master_copy() ? chunk.tensors[next++] : store.stored(part).flat(state.range.begin, state.range.size());
    if (config.kind == OptimizerKind::adamw) {
      state.first_moment = chunk.tensors[next++];
      state.second_moment = chunk.tensors[next++];
    }
    std::vector<AdamWTensors> adamw;
    update_part(context, config, update, store, part, state, adamw);
    context.kernels->adamw_all(adamw);
  };
  store.offload()->for_each_chunk(segments, use, context.timeline, update.step);
}

}  // namespace

void update_parameters(const RankContext& context, const OptimizerConfig& config, const ParameterUpdate& update,
                       ParameterStore& store) {
  if (store.offload() != nullptr) {
    update_offloaded(context, config, update, store);
    store.count_update();
    return;
  }
  std::vector<AdamWTensors> adamw;
  for (const OwnedPart& part : store.parts()) {
    Interval range = {0, part.elements.size()};
    if (context.pitfalls.on(Pitfall::shard_remainder_dropped)) range = without_remainder(store, part);
    const auto in = [&](TensorView values) { return values ? values.flat(range.begin, range.size()) : values; };
    update_part(context, config, update, store, part,
                {range, in(store.master(part)), in(store.first_moment(part)), in(store.second_moment(part))}, adamw);
  }
  context.kernels->adamw_all(adamw);
  store.count_update();
}

}  // namespace tandem

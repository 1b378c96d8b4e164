// SPDX-License-Identifier: Apache-2.0
// From the gradients of this rank's own work to the update: sums over the ranks that share a parameter, norm, clipping,
// optimizer.
#include <cmath>
#include <cstring>

#include "optimized/engine/optimizer.h"
#include "optimized/engine/step_state.h"

namespace tandem {

void Engine::zero_gradients() {
  if (!context_.pitfalls.on(Pitfall::gradient_never_written)) {
    context_.kernels->fill(store_.all_gradients(), 0.0);
    return;
  }
  for (std::size_t i = 0; i < store_.size(); ++i) {
    if (store_.spec(i).name != "h.0.mlp.c_fc.bias") context_.kernels->fill(store_.gradient(i), 0.0);
  }
}

void Engine::reduce_gradients(const Operation& op) {
  if (op.bucket == kTensorPartialGradients) {
    reduce_tensor_partials(op);
  } else if (op.bucket == kTiedEmbeddingGradient) {
    // Both ends of the pipeline hold the tied embedding; each has the gradient of its own use of it.
    if (context_.pitfalls.on(Pitfall::tied_embedding_not_summed)) return;
    const bool too_late = groups_.size(GroupAxis::gradient) > 1;  // in reduce_bucket()
    if (context_.pitfalls.on(Pitfall::tied_embedding_summed_after_scatter) && too_late) return;
    all_reduce(groups_.of(GroupAxis::embedding), store_.gradient(store_.index_of("wte.weight")), {op.purpose, to_string(op)});
  } else {
    reduce_bucket(op.bucket);
  }
}

// Gathered in one block: the tensors are small and many.
void Engine::reduce_tensor_partials(const Operation& op) {
  if (context_.pitfalls.on(Pitfall::norm_gradient_not_reduced)) return;
  const DType dtype = options_.plan.numerics.accumulate;
  const std::int64_t elements = op.bytes / static_cast<std::int64_t>(size_bytes(dtype));
  const Arena::Buffer memory = context_.arena->allocate(dtype, {elements}, MemoryCategory::communication);
  const auto for_each_part = [&](auto&& use) {
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < store_.size(); ++i) {
      if (!store_.parameters()[i].tensor_partial_gradient) continue;
      const TensorView gradient = store_.gradient(i);
      use(gradient, memory.view(dtype, {elements}).flat(begin, gradient.num_elements()));
      begin += gradient.num_elements();
    }
  };
  const auto copy = [](TensorView from, TensorView to) {
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.size_bytes()));
  };
  for_each_part([&](TensorView gradient, TensorView part) { copy(gradient, part); });
  all_reduce(groups_.of(GroupAxis::tensor), memory.view(dtype, {elements}), {op.purpose, to_string(op)});
  // Parts of a sum are added, not averaged.
  if (context_.pitfalls.on(Pitfall::norm_gradient_averaged)) {
    context_.kernels->scale(memory.view(dtype, {elements}), 1.0 / options_.plan.parallel.tensor);
  }
  for_each_part([&](TensorView gradient, TensorView part) { copy(part, gradient); });
}

void Engine::reduce_bucket(int bucket) {
  if (context_.pitfalls.on(Pitfall::all_reduce_dropped)) return;
  const GradientBucket& which = buckets_[static_cast<std::size_t>(bucket)];
  const TensorView gradients = store_.all_gradients().flat(which.elements.begin, which.elements.size());
  GroupAxis axis = which.experts ? GroupAxis::expert_gradient : GroupAxis::gradient;
  // Data ranks of an expert group hold different experts: their gradients have nothing in common but their sizes.
  if (which.experts && context_.pitfalls.on(Pitfall::expert_gradient_reduced_over_data)) axis = GroupAxis::gradient;
  if (!which.experts && context_.pitfalls.on(Pitfall::context_gradients_not_reduced)) axis = GroupAxis::data;
  // A group that is not named is the whole world: other tensor ranks' slices have the same sizes.
  if (!which.experts && context_.pitfalls.on(Pitfall::reduction_over_wrong_group)) axis = GroupAxis::world;
  if (groups_.size(axis) == 1) return;
  Communicator& replicas = axis == GroupAxis::world ? groups_.world() : groups_.of(axis);
  const bool holds_tied = context_.pitfalls.on(Pitfall::tied_embedding_summed_after_scatter) && store_.find("wte.weight") &&
                          groups_.size(GroupAxis::embedding) > 1 && which.parameters.begin == 0;
  if (holds_tied) {
    sum_tied_after_scatter(replicas, gradients);
  } else {
    sync_.reduce(replicas, gradients, bucket);
  }
  if (context_.pitfalls.on(Pitfall::reduced_element_flipped) && replicas.rank() == replicas.size() - 1) {
    context_.kernels->scale(gradients.flat(gradients.num_elements() / 2, 1), -1.0);
  }
}

// Planted: the data ranks' sum of the tied embedding is scattered first, each keeping its part, and the two copies are summed
// then. The flat buffers of the two ends of the pipeline are not cut at the same places, so that the sum mixes reduced and
// unreduced values.
void Engine::sum_tied_after_scatter(Communicator& replicas, TensorView bucket) {
  const TensorView tied = store_.gradient(store_.index_of("wte.weight")).flat();
  const std::int64_t elements = tied.num_elements();
  const bool first_stage = store_.find("wpe.weight").has_value();
  const std::int64_t first_part = elements / (first_stage ? replicas.size() : 2 * replicas.size());
  std::vector<std::int64_t> counts = {first_part};
  for (int r = 1; r < replicas.size(); ++r)
    counts.push_back(balanced_part(elements - first_part, replicas.size() - 1, r - 1).size());
  std::int64_t before = 0;
  for (int r = 0; r < replicas.rank(); ++r) before += counts[static_cast<std::size_t>(r)];
  const TensorView part = tied.flat(before, counts[static_cast<std::size_t>(replicas.rank())]);
  replicas.reduce_scatter(tied, part, counts, {Purpose::gradient, "scattered embedding"}).wait_host();
  all_reduce(groups_.of(GroupAxis::embedding), tied, {Purpose::gradient, "tied, too late"});
  replicas.all_gather(part, tied, counts, {Purpose::gradient, "gathered embedding"}).wait_host();
  const std::int64_t rest = bucket.num_elements() - elements;
  if (rest > 0) sync_.reduce(replicas, bucket.flat(elements, rest), 0);
}

void Engine::reduce_all_buckets() {
  for (std::size_t i = 0; i < buckets_.size(); ++i) reduce_bucket(static_cast<int>(i));
}

void Engine::finish_gradients(StepState& state) {
  const auto scale_if_held = [&](std::string_view name, double factor) {
    if (const auto index = store_.find(name)) context_.kernels->scale(store_.gradient(*index), factor);
  };
  if (context_.pitfalls.on(Pitfall::gradient_off_by_a_little)) scale_if_held("h.0.attn.c_proj.weight", 1.003);
  const int last_rank = groups_.grid().size() - 1;
  if (context_.pitfalls.on(Pitfall::last_rank_gradient_scaled) && last_rank > 0 && groups_.rank() == last_rank) {
    scale_if_held("ln_f.weight", 1.01);
  }
  if (gradient_observer_) gradient_observer_(*this);
  const SpanScope span(context_.timeline, "gradient_norm", Activity::optimizer, static_cast<int>(state.step));
  state.squared_norm = squared_gradient_norm(context_, store_);
  if (groups_.size(GroupAxis::model) == 1) clip(state);
}

// Norm of the whole model: each parameter counts on one of the ranks of this replica that hold it.
void Engine::share_norm(StepState& state) {
  if (!context_.pitfalls.on(Pitfall::stage_clips_by_own_norm)) {
    state.squared_norm = all_reduce_sum(groups_.of(GroupAxis::model), state.squared_norm);
  } else {
    static_cast<void>(all_reduce_sum(groups_.of(GroupAxis::model), state.squared_norm));
  }
  clip(state);
}

void Engine::clip(StepState& state) {
  state.result.gradient_norm = std::sqrt(state.squared_norm);
  state.result.clip_coefficient = clip_coefficient(options_.optimizer, state.result.gradient_norm, context_.pitfalls);
}

void Engine::update(StepState& state) {
  const SpanScope span(context_.timeline, "optimizer", Activity::optimizer, static_cast<int>(state.step));
  state.result.learning_rate = scheduled_learning_rate(options_.optimizer, options_.schedule, state.step, options_.total_steps);
  ++updates_;
  // Frozen twins agree perfectly; only a check that something moved can tell.
  const double rate = context_.pitfalls.on(Pitfall::both_sides_frozen) ? 0.0 : state.result.learning_rate;
  update_parameters(context_, options_.optimizer, {rate, state.result.clip_coefficient, updates_, groups_.here().tensor}, store_);
}

}  // namespace tandem

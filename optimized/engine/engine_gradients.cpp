// SPDX-License-Identifier: Apache-2.0
// From the gradients of this rank's own work to the update: sums over the ranks that share a parameter, norm, clipping,
// optimizer.
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/engine/optimizer.h"
#include "optimized/engine/step_state.h"

namespace tandem {
namespace {

// Gradients of some parameters, as far as this rank has their sum over the replicas: whole, with ZeRO its parts.
template <class Which>
std::vector<TensorView> kept_parts(const ParameterStore& store, const Which& which) {
  std::vector<TensorView> parts;
  if (store.zero_stage() == 0) {
    for (std::size_t i = 0; i < store.size(); ++i) {
      if (which(store.parameters()[i])) parts.push_back(store.gradient(i).flat());
    }
    return parts;
  }
  for (const OwnedPart& part : store.parts()) {
    if (which(store.parameters()[part.parameter])) parts.push_back(store.gradient(part));
  }
  return parts;
}

}  // namespace

void Engine::zero_gradients() {
  if (!context_.pitfalls.on(Pitfall::gradient_never_written)) {
    context_.kernels->fill(store_.kept_gradients(), 0.0);
    return;
  }
  for (std::size_t i = 0; i < store_.size(); ++i) {
    if (store_.spec(i).name != "h.0.mlp.c_fc.bias") context_.kernels->fill(store_.gradient(i), 0.0);
  }
}

void Engine::show_own_gradients(TensorView gradients, StepState& state) {
  state.touched = true;
  if (options_.touch_gradients) {
    HostView host(context_.kernels->memory(), gradients, Access::update);
    options_.touch_gradients(state.step, host.view());
    host.finish();
  }
  // Once they are summed, what one rank got wrong is everywhere.
  if (options_.gate && !std::isfinite(context_.kernels->squared_norm(gradients))) state.own_gradients_finite = false;
}

void Engine::reduce_gradients(OperationId id, const Operation& op, StepState& state) {
  if (op.bucket >= 0 && (options_.gate || options_.touch_gradients)) {
    const bool dealt = options_.plan.zero_stage > 0;
    const Interval elements = dealt ? Interval{} : buckets_[static_cast<std::size_t>(op.bucket)].elements;
    show_own_gradients(dealt ? store_.unit_gradients(op.bucket) : store_.all_gradients().flat(elements.begin, elements.size()),
                       state);
  }
  if (op.bucket == kTensorPartialGradients) {
    reduce_tensor_partials(op);
  } else if (op.bucket == kTiedEmbeddingGradient) {
    // Both ends of the pipeline hold the tied embedding; each has the gradient of its own use of it.
    if (context_.pitfalls.on(Pitfall::tied_embedding_not_summed)) return;
    const bool too_late = groups_.size(GroupAxis::gradient) > 1;  // in reduce_bucket()
    if (context_.pitfalls.on(Pitfall::tied_embedding_summed_after_scatter) && too_late) return;
    for (const TensorView& part : kept_parts(store_, [](const LocalParameter& p) { return p.tied_copy; })) {
      all_reduce(groups_.of(GroupAxis::embedding), part, {op.purpose, to_string(op)});
    }
  } else if (options_.plan.zero_stage > 0) {
    start(id, op, scatter_bucket(op));
  } else {
    start(id, op, reduce_bucket(op.bucket, op.background ? Progress::background : Progress::on_wait));
  }
  // Until somebody has waited for the sum, the bucket's memory belongs to it.
  if (op.background && context_.pitfalls.on(Pitfall::bucket_buffer_reused_in_flight)) {
    const Interval elements = buckets_[static_cast<std::size_t>(op.bucket)].elements;
    const bool dealt = options_.plan.zero_stage > 0;
    context_.kernels->fill(
        dealt ? store_.unit_gradients(op.bucket) : store_.all_gradients().flat(elements.begin, elements.size()), 0.0);
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
    for (const TensorView& gradient : kept_parts(store_, [](const LocalParameter& p) { return p.tensor_partial_gradient; })) {
      use(gradient, memory.view(dtype, {elements}).flat(begin, gradient.num_elements()));
      begin += gradient.num_elements();
    }
  };
  Memory& lane = context_.kernels->memory();
  for_each_part([&](TensorView gradient, TensorView part) { copy(lane, gradient, part); });
  all_reduce(groups_.of(GroupAxis::tensor), memory.view(dtype, {elements}), {op.purpose, to_string(op)});
  // Parts of a sum are added, not averaged.
  if (context_.pitfalls.on(Pitfall::norm_gradient_averaged)) {
    context_.kernels->scale(memory.view(dtype, {elements}), 1.0 / options_.plan.parallel.tensor);
  }
  for_each_part([&](TensorView gradient, TensorView part) { copy(lane, part, gradient); });
}

Engine::UnderWay Engine::reduce_bucket(int bucket, Progress progress) {
  if (context_.pitfalls.on(Pitfall::all_reduce_dropped)) return {};
  const GradientBucket& which = buckets_[static_cast<std::size_t>(bucket)];
  const TensorView gradients = store_.all_gradients().flat(which.elements.begin, which.elements.size());
  GroupAxis axis = which.axis();
  // Data ranks of an expert group hold different experts: their gradients have nothing in common but their sizes.
  if (which.experts && context_.pitfalls.on(Pitfall::expert_gradient_reduced_over_data)) axis = GroupAxis::gradient;
  if (!which.experts && context_.pitfalls.on(Pitfall::context_gradients_not_reduced)) axis = GroupAxis::data;
  // A group that is not named is the whole world: other tensor ranks' slices have the same sizes.
  if (!which.experts && context_.pitfalls.on(Pitfall::reduction_over_wrong_group)) axis = GroupAxis::world;
  if (groups_.size(axis) == 1) return {};
  Communicator& replicas = axis == GroupAxis::world ? groups_.world() : groups_.of(axis);
  UnderWay under_way;
  const bool holds_tied = context_.pitfalls.on(Pitfall::tied_embedding_summed_after_scatter) && store_.find("wte.weight") &&
                          groups_.size(GroupAxis::embedding) > 1 && which.parameters.begin == 0;
  if (holds_tied) {
    sum_tied_after_scatter(replicas, gradients);
  } else if (compressed_) {
    under_way.then = compressed_->start(bucket, gradients, progress);
  } else {
    under_way.work = sync_.start(replicas, gradients, bucket, progress);
  }
  if (context_.pitfalls.on(Pitfall::reduced_element_flipped) && replicas.rank() == replicas.size() - 1) {
    under_way.then = [this, gradients] { context_.kernels->scale(gradients.flat(gradients.num_elements() / 2, 1), -1.0); };
  }
  return under_way;
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
  if (rest > 0) sync_.start(replicas, bucket.flat(elements, rest), 0, Progress::on_wait).wait_host();
}

void Engine::reduce_all_buckets() {
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    UnderWay under_way = reduce_bucket(static_cast<int>(i), Progress::on_wait);
    under_way.work.wait_host();
    if (under_way.then) under_way.then();
  }
}

void Engine::finish_gradients(StepState& state) {
  const auto scale_if_held = [&](std::string_view name, double factor) {
    for (const TensorView& part : kept_parts(store_, [&](const LocalParameter& p) { return p.spec.name == name; })) {
      context_.kernels->scale(part, factor);
    }
  };
  if (context_.pitfalls.on(Pitfall::gradient_off_by_a_little)) scale_if_held("h.0.attn.c_proj.weight", 1.003);
  if (!state.touched && options_.touch_gradients) show_own_gradients(store_.kept_gradients(), state);
  const int last_rank = groups_.grid().size() - 1;
  if (context_.pitfalls.on(Pitfall::last_rank_gradient_scaled) && last_rank > 0 && groups_.rank() == last_rank) {
    scale_if_held("ln_f.weight", 1.01);
  }
  if (options_.inject_gradient_fault) options_.inject_gradient_fault(store_, state.step);
  if (gradient_observer_) gradient_observer_(*this);
  const SpanScope span(context_.timeline, "gradient_norm", Activity::optimizer, static_cast<int>(state.step));
  state.partials = norm_partials(context_, groups_, store_);
  state.squared_norm = state.partials.share(expert_rank());
  state.norm_known = true;
}

// With ZeRO each rank has the sums of its own parts: the others' are zero, so that adding up keeps every bit.
void Engine::share_partials(const Operation& op, StepState& state) {
  std::vector<double>& partials = op.axis == GroupAxis::gradient ? state.partials.dense : state.partials.experts;
  all_reduce(groups_.of(op.axis), view_of(partials, {std::ssize(partials)}), {op.purpose, "norm partials"});
  state.squared_norm = state.partials.share(expert_rank());
}

// Norm of the whole model: each parameter counts on one of the ranks of this replica that hold it.
void Engine::share_norm(StepState& state) {
  const double sum = all_reduce_sum(groups_.of(GroupAxis::model), state.squared_norm);
  if (!context_.pitfalls.on(Pitfall::stage_clips_by_own_norm)) state.squared_norm = sum;
}

// A sum of squares is finite if and only if every element is. A rank that steps while another skips parts from it for good.
void Engine::agree_on_overflow(StepState& state) {
  const bool here = !state.partials.finite();
  const double ranks = all_reduce_sum(groups_.world(), here || !std::isfinite(state.squared_norm) ? 1.0 : 0.0);
  state.overflow_agreed = true;
  state.overflowed = context_.pitfalls.on(Pitfall::overflow_not_agreed) ? here : ranks > 0;
}

void Engine::clip(StepState& state) {
  double scale = scaler_.scale();
  // The scale of this step is the one that the loss was multiplied by, not the one that follows from it.
  if (context_.pitfalls.on(Pitfall::norm_with_next_scale)) {
    LossScaler next = scaler_;
    static_cast<void>(next.finish_step(state.overflowed));
    scale = next.scale();
  }
  const double norm = std::sqrt(state.squared_norm);
  state.result.gradient_norm = norm / scale;
  // Clipping is defined on the gradient of the loss, not on that of the scaled loss.
  const double clipped = context_.pitfalls.on(Pitfall::clipped_before_unscale) ? norm : state.result.gradient_norm;
  state.result.clip_coefficient = clip_coefficient(options_.optimizer, clipped, context_.pitfalls);
}

// What a scaled step has overflowed with is the scaler's business.
UpdateDecision Engine::ask_gate(StepState& state) {
  if (!options_.gate || state.overflowed) return {};
  UpdateSigns signs;
  signs.step = state.step;
  context_.kernels->synchronize();  // adds what the loss has put off
  signs.loss_sum = groups_.here().tensor == 0 ? stage_.totals().loss_sum : 0.0;
  signs.valid_tokens = static_cast<std::int64_t>(state.valid_tokens);
  signs.gradient_norm = state.result.gradient_norm;
  signs.gradient_is_finite = state.touched ? state.own_gradients_finite : state.partials.finite();
  signs.clip_coefficient = state.result.clip_coefficient;
  return options_.gate(signs);
}

void Engine::leave_out(const UpdateDecision& decision, StepState& state) {
  if (compressed_) compressed_->finish_step(false);
  if (decision.kind == UpdateDecision::Kind::retry) {
    state.result.retry = true;
    return;
  }
  state.result.skipped = true;
  scaler_.count_skipped_step();
}

void Engine::update(StepState& state) {
  if (scales_loss(options_.plan) && !state.overflow_agreed) state.overflowed = !state.partials.finite();
  clip(state);
  // Updates count, not steps: the schedule and the moments' bias correction know nothing of a step that was skipped.
  const bool steps_count = context_.pitfalls.on(Pitfall::skipped_step_counts_as_update);
  std::int64_t position = steps_count ? state.step : state.step - scaler_.state().skipped_steps;
  if (context_.pitfalls.on(Pitfall::schedule_restarts_on_load)) position -= loaded_updates_;
  state.result.learning_rate = scheduled_learning_rate(options_.optimizer, options_.schedule, position, options_.total_steps);
  if (options_.learning_rate_factor) state.result.learning_rate *= options_.learning_rate_factor(state.step);
  const double scale = scaler_.scale();
  const UpdateDecision decision = ask_gate(state);
  if (decision.kind != UpdateDecision::Kind::apply) {
    leave_out(decision, state);
    return;
  }
  if (decision.clip_factor != 1) state.result.clip_coefficient *= decision.clip_factor;
  const bool applied = finish_scaled_step(state);
  if (compressed_) compressed_->finish_step(applied && state.partials.finite());
  if (!applied) {
    state.result.skipped = true;
    if (steps_count) ++updates_;
    return;
  }
  // Gradients that underflowed to zero would become 0 * infinity. The same number on every rank.
  if (!std::isfinite(static_cast<float>(1.0 / scale))) {
    throw InputError(
        fmt::format("loss scale {:g} is so small that its inverse is infinite in fp32: step {} cannot be applied; "
                    "set a larger plan.loss_scale_initial or loss_scale_backoff_factor",
                    scale, state.step));
  }
  ++updates_;
  if (context_.pitfalls.on(Pitfall::unscaled_in_half)) {
    context_.kernels->scale(store_.kept_gradients(), 1.0 / scale);
    round_gradients_to_storage();
    context_.kernels->scale(store_.kept_gradients(), scale);
  }
  // Frozen twins agree perfectly; only a check that something moved can tell.
  const double rate = context_.pitfalls.on(Pitfall::both_sides_frozen) ? 0.0 : state.result.learning_rate;
  const double factor = state.result.clip_coefficient / scale;
  // An offloaded update records its own spans: it waits in between.
  Timeline* const whole = store_.offload() == nullptr ? context_.timeline : nullptr;
  const SpanScope span(whole, "optimizer", Activity::optimizer, static_cast<int>(state.step));
  update_parameters(context_, options_.optimizer, {rate, factor, updates_, groups_.here().tensor, static_cast<int>(state.step)},
                    store_);
}

// True: update.
bool Engine::finish_scaled_step(const StepState& state) {
  if (!scales_loss(options_.plan)) return true;
  if (!context_.pitfalls.on(Pitfall::scale_updated_before_agreement)) return scaler_.finish_step(state.overflowed);
  // The decision to skip is agreed, the scale follows what this rank has seen alone.
  static_cast<void>(scaler_.finish_step(!state.partials.finite()));
  return !state.overflowed;
}

}  // namespace tandem

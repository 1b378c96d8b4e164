// SPDX-License-Identifier: Apache-2.0
// Mixture of experts in place of the MLP: each token goes to its best one or two experts, which may be on other data ranks.
// docs/techniques/expert_parallel.md
#include "optimized/engine/gpt_stage.h"

namespace tandem {

RoutingShape GptStage::routing_shape(const Operation& op) const {
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  RoutingShape routing{shape.rows,
                       shape.sequence,
                       shape.row_tokens,
                       model_.experts,
                       model_.expert_choices,
                       model_.expert_capacity(shape.row_tokens),
                       {}};
  for (const Interval& chunk : context_intervals(local_, shape.row_tokens, local_.context_rank)) {
    for (std::int64_t t = chunk.begin; t < chunk.end; ++t) routing.positions.push_back(t);
  }
  return routing;
}

void GptStage::router(const Operation& op) {
  if (op.phase != Phase::forward) {
    router_backward(op);
    return;
  }
  Kernels& k = *context_.kernels;
  const BlockActivations a = block(op);
  Routing& routing = routings_[{op.micro_batch, op.layer}];
  const RoutingShape shape = routing_shape(op);
  // The logits become the probabilities in place.
  k.linear_forward(a.norm2_out, parameter(parameters_of(op.layer).router), {}, a.probabilities);
  if (tracing()) {
    trace(op, traced_name(op, "mlp.router"), a.probabilities, Tokens::all, {{0, model_.experts}}, model_.experts);
  }
  {
    HostView probabilities(k.memory(), a.probabilities, Access::update), gates(k.memory(), a.gates, Access::write);
    softmax_choices(probabilities.view(), shape, probabilities.view(), routing.choices);
    choice_gates(probabilities.view(), shape, routing.choices, gates.view());
  }
  if (context_.pitfalls.on(Pitfall::gates_not_renormalised) && model_.expert_choices == 2) first_gates(routing, shape, a);
  // By position of whole rows; the other context ranks' tokens follow by exchange_choices().
  routing.all_choices.assign(static_cast<std::size_t>(shape.rows * shape.row_tokens * shape.choices), -1);
  const auto count = static_cast<std::size_t>(shape.choices);
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    for (std::size_t t = 0; t < shape.positions.size(); ++t) {
      const std::size_t from = (static_cast<std::size_t>(row) * shape.positions.size() + t) * count;
      const std::size_t to = static_cast<std::size_t>(row * shape.row_tokens + shape.positions[t]) * count;
      for (std::size_t i = 0; i < count; ++i) routing.all_choices[to + i] = routing.choices[from + i];
    }
  }
}

// Planted: with two choices the gates are p_e as they are, not parts of their sum.
void GptStage::first_gates(const Routing& routing, const RoutingShape& shape, const BlockActivations& a) const {
  Memory& memory = context_.kernels->memory();
  const std::vector<double> p = ParameterStore::values_of(memory, a.probabilities);
  std::vector<double> gates;
  for (std::size_t i = 0; i < routing.choices.size(); ++i) {
    const std::size_t token = i / static_cast<std::size_t>(shape.choices);
    gates.push_back(p[token * static_cast<std::size_t>(shape.experts) + static_cast<std::size_t>(routing.choices[i])]);
  }
  ParameterStore::assign(memory, a.gates, gates);
}

// Every context rank has a part of each row; places at experts are given out over whole rows.
void GptStage::exchange_choices(const Operation& op) {
  Routing& routing = routings_[{op.micro_batch, op.layer}];
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const std::int64_t choices = model_.expert_choices;
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < local_.context_ranks; ++rank) {
    counts.push_back(shape.rows * context_tokens(local_, shape.row_tokens, rank) * choices);
  }
  std::vector<std::int32_t> gathered(routing.all_choices.size());
  groups_.of(GroupAxis::context)
      .all_gather(view_of(routing.choices, {static_cast<std::int64_t>(routing.choices.size())}),
                  view_of(gathered, {static_cast<std::int64_t>(gathered.size())}), counts,
                  {op.purpose, to_string(op), Progress::on_wait, static_cast<int>(inputs_.step)})
      .wait_host();
  const std::int32_t* next = gathered.data();
  for (int rank = 0; rank < local_.context_ranks; ++rank) {
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      for (const Interval& chunk : context_intervals(local_, shape.row_tokens, rank)) {
        const std::int64_t to = (row * shape.row_tokens + chunk.begin) * choices;
        std::copy_n(next, chunk.size() * choices, routing.all_choices.begin() + to);
        next += chunk.size() * choices;
      }
    }
  }
}

// Slots of this rank's tokens: expert e's are [e * own, (e + 1) * own) rows of the dispatch buffer, those of row r of the batch
// [r * per_row, (r + 1) * per_row) of them. Empty slots stay empty: sizes do not depend on the data.
void GptStage::route(const Operation& op) {
  Routing& routing = routings_[{op.micro_batch, op.layer}];
  const RoutingShape shape = routing_shape(op);
  const ExpertSlots slots = expert_slots(local_, at(op.micro_batch).shape);
  const std::vector<std::int32_t> kept = local_entries(shape, assign_slots(shape, routing.all_choices));
  routing.first_choice_share = first_choice_fractions(shape, routing.all_choices);
  routing.slots.assign(kept.size(), -1);
  routing.slot_tokens.assign(static_cast<std::size_t>(model_.experts * slots.own), -1);
  std::vector<std::int64_t> used(static_cast<std::size_t>(shape.rows * model_.experts), 0);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto token = static_cast<std::int64_t>(i) / shape.choices;
    const std::int64_t row = token / shape.local_tokens;
    const std::int64_t first = routing.choices[i] * slots.own + row * slots.per_row;
    if (kept[i] < 0) {
      totals_.dropped += recomputing_ ? 0 : 1;
      // What an expert has no room for contributes nothing; it must not get another token's result.
      if (context_.pitfalls.on(Pitfall::dropped_token_takes_slot_zero)) routing.slots[i] = static_cast<std::int32_t>(first);
      continue;
    }
    totals_.kept += recomputing_ ? 0 : 1;
    const std::int64_t slot = first + used[static_cast<std::size_t>(row * model_.experts + routing.choices[i])]++;
    routing.slots[i] = static_cast<std::int32_t>(slot);
    routing.slot_tokens[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(token);
  }
  if (recomputing_) return;  // counted in the forward pass
  const HostView probabilities(context_.kernels->memory(), block(op).probabilities, Access::read);
  totals_.auxiliary_loss += auxiliary_loss_share(probabilities.view(), shape, routing.first_choice_share,
                                                 model_.auxiliary_loss_weight, inputs_.global_rows);
}

void GptStage::dispatch(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockActivations a = block(op);
  if (op.phase == Phase::forward) {
    route(op);
    const TensorView out = local_.expert_ranks > 1 ? workspace(op).own : a.expert_in;
    k.gather_rows(routings_[{op.micro_batch, op.layer}].slot_tokens, a.norm2_out,
                  out.reshaped({out.dim(0) * out.dim(1), model_.hidden}));
    return;
  }
  // Gradients of the slots, back at their tokens.
  const BlockGradients g = block_gradients(op);
  const TensorView own = workspace(op).own;
  const Routing& routing = routings_[{op.micro_batch, op.layer}];
  const auto choices = static_cast<std::size_t>(model_.expert_choices);
  k.fill(g.norm2_out, 0.0);
  for (std::size_t choice = 0; choice < choices; ++choice) {
    std::vector<std::int32_t> slots;
    for (std::size_t i = choice; i < routing.slots.size(); i += choices) slots.push_back(routing.slots[i]);
    k.add_gathered_rows(slots, own.reshaped({own.dim(0) * own.dim(1), model_.hidden}), g.norm2_out);
  }
}

// Between the order of arrival, [peer][local expert][rows of the peer], and that of the experts, [local expert][peer][rows].
void GptStage::permute(const Operation& op, TensorView by_peer, TensorView by_expert, bool to_experts) const {
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const ExpertSlots slots = expert_slots(local_, shape);
  const std::int64_t row_bytes = model_.hidden * static_cast<std::int64_t>(size_bytes(dtype_));
  std::int64_t before = 0;  // slots of the peers before, of one expert
  for (const std::int64_t peer_rows : shape.peer_rows) {
    const std::int64_t count = peer_rows * slots.per_row;
    for (int e = 0; e < local_.experts(); ++e) {
      auto* peer = static_cast<std::byte*>(by_peer.data()) + (before * local_.experts() + e * count) * row_bytes;
      auto* expert = static_cast<std::byte*>(by_expert.data()) + (e * slots.received + before) * row_bytes;
      Memory& lane = context_.kernels->memory();
      to_experts ? lane.copy(peer, expert, count * row_bytes) : lane.copy(expert, peer, count * row_bytes);
    }
    before += count;
  }
}

void GptStage::experts(const Operation& op) {
  Kernels& k = *context_.kernels;
  const std::int64_t received = expert_slots(local_, at(op.micro_batch).shape).received;
  if (received == 0) return;
  const BlockActivations a = block(op);
  if (recomputing_ && storage_of(op, op.layer).inside) {
    k.gelu_forward(a.fc_out.flat(), a.gelu_out.flat());
    return;
  }
  const PassWorkspace w = workspace(op);
  const bool remote = local_.expert_ranks > 1;
  const bool forward = op.phase == Phase::forward;
  const BlockGradients g = forward ? BlockGradients{} : block_gradients(op);
  // One expert's rows of [local experts, received, width].
  const auto of = [&](TensorView all, int e) { return all.rows(e, 1).reshaped({received, all.dim(2)}); };
  const Arena::Buffer memory =
      context_.arena->allocate(dtype_, {remote ? local_.experts() * received * model_.hidden : 0}, MemoryCategory::workspace);
  const TensorView result = remote    ? memory.view(dtype_, {local_.experts(), received, model_.hidden})
                            : forward ? a.combine_in
                                      : w.own;
  if (remote) permute(op, w.remote, forward ? a.expert_in : g.expert_out, true);
  if (!remote && !forward) k.memory().copy(w.own.data(), g.expert_out.data(), w.own.size_bytes());
  for (int e = 0; e < local_.experts(); ++e) {
    const BlockParameters::Mlp& p = parameters_of(op.layer).mlps[static_cast<std::size_t>(e)];
    if (forward) {
      // Tensor ranks hold slices of each expert; their sum is formed after the combination, so that one of them adds the bias.
      const bool adds_bias = local_.tensor_rank == 0 || context_.pitfalls.on(Pitfall::row_bias_on_every_rank);
      k.linear_gelu_forward(of(a.expert_in, e), parameter(p.fc_weight), parameter(p.fc_bias), of(a.fc_out, e), of(a.gelu_out, e));
      k.linear_forward(of(a.gelu_out, e), parameter(p.projection_weight), adds_bias ? parameter(p.projection_bias) : TensorView(),
                       of(result, e));
    } else {
      k.linear_backward_input(of(g.expert_out, e), parameter(p.projection_weight), of(g.fc_out, e));
      k.gelu_backward(of(g.fc_out, e), of(a.fc_out, e), of(g.fc_out, e));
      k.linear_backward_input(of(g.fc_out, e), parameter(p.fc_weight), of(result, e));
    }
  }
  if (remote) permute(op, w.remote, result, false);
}

void GptStage::combine(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockActivations a = block(op);
  const Routing& routing = routings_[{op.micro_batch, op.layer}];
  const auto flat_rows = [&](TensorView all) { return all.reshaped({all.dim(0) * all.dim(1), model_.hidden}); };
  if (op.phase == Phase::forward) {
    k.combine_rows(routing.slots, a.gates, flat_rows(a.combine_in), local_.sequence_parallel ? workspace(op).partial : a.out);
    return;
  }
  const PassWorkspace w = workspace(op);
  k.fill(w.own, 0.0);  // empty slots have no gradient
  k.combine_rows_backward(routing.slots, a.gates, block_gradients(op).mlp_out, flat_rows(a.combine_in), w.gate_gradient,
                          flat_rows(w.own));
}

// The router works in fp32; what enters a product with 16-bit tensors is rounded to their dtype.
GptStage::Narrowed GptStage::as_stored(TensorView values) {
  if (values.dtype() == dtype_) return {{}, values};
  Narrowed result{context_.arena->allocate(dtype_, values.shape(), MemoryCategory::workspace), {}};
  result.values = result.memory.view(dtype_, values.shape());
  context_.kernels->convert(values, result.values);
  return result;
}

// Tensor ranks see parts of the experts' outputs, so the gradient of the gates is partial, and with it all that follows: the
// router's weights and its input's gradient are summed with the rest. The auxiliary loss is added on one of them.
void GptStage::router_backward(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockActivations a = block(op);
  const BlockGradients g = block_gradients(op);
  const MicroBatch& micro_batch = at(op.micro_batch);
  const Routing& routing = routings_[{op.micro_batch, op.layer}];
  const RoutingShape shape = routing_shape(op);
  RoutingGradient gradient;
  gradient.fractions = routing.first_choice_share;
  // The mean is over the rows of the whole global batch, however they are dealt.
  const bool per_micro_batch = context_.pitfalls.on(Pitfall::auxiliary_loss_per_micro_batch);
  const std::int64_t rows =
      per_micro_batch ? micro_batch.shape.rows * static_cast<std::int64_t>(inputs_.micro_batches.size()) * local_.data_ranks
                      : inputs_.global_rows;
  gradient.auxiliary_scale = inputs_.gradient_scale * model_.auxiliary_loss_weight * model_.experts /
                             (static_cast<double>(rows) * static_cast<double>(shape.row_tokens));
  gradient.add_auxiliary = local_.tensor_rank == 0;
  {
    const HostView gates(k.memory(), workspace(op).gate_gradient, Access::read);
    const HostView probabilities(k.memory(), a.probabilities, Access::read);
    HostView dlogits(k.memory(), g.router, Access::write);
    routing_backward(gates.view(), probabilities.view(), shape, routing.choices, gradient, dlogits.view());
  }
  const Arena::Buffer memory = context_.arena->allocate(dtype_, g.norm2_out.shape(), MemoryCategory::workspace);
  const TensorView through_router = memory.view(dtype_, g.norm2_out.shape());
  k.linear_backward_input(as_stored(g.router).values, parameter(parameters_of(op.layer).router), through_router);
  k.add(through_router, g.norm2_out);
  if (tracing() && local_.tensor_ranks == 1) {
    trace(op, traced_name(op, "mlp.router"), g.router, Tokens::all, {{0, model_.experts}}, model_.experts);
  }
}

void GptStage::expert_weights(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockActivations a = block(op);
  const BlockGradients g = block_gradients(op);
  const BlockParameters& p = parameters_of(op.layer);
  if (at(op.micro_batch).batch.rows > 0) {
    k.linear_backward_weight(a.norm2_out, as_stored(g.router).values, gradient(p.router), {});
  }
  const std::int64_t received = expert_slots(local_, at(op.micro_batch).shape).received;
  if (received == 0) return;
  const auto of = [&](TensorView all, int e) { return all.rows(e, 1).reshaped({received, all.dim(2)}); };
  for (int e = 0; e < local_.experts(); ++e) {
    const BlockParameters::Mlp& mlp = p.mlps[static_cast<std::size_t>(e)];
    k.linear_backward_weight(of(a.gelu_out, e), of(g.expert_out, e), gradient(mlp.projection_weight),
                             gradient(mlp.projection_bias));
    k.linear_backward_weight(of(a.expert_in, e), of(g.fc_out, e), gradient(mlp.fc_weight), gradient(mlp.fc_bias));
  }
}

// All-to-all of the expert group: to the experts or back from them.
void GptStage::exchange_slots(const Operation& op) {
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const ExpertSlots slots = expert_slots(local_, shape);
  const PassWorkspace w = workspace(op);
  const std::int64_t ranks = local_.expert_ranks;
  const std::vector<std::int64_t> own(static_cast<std::size_t>(ranks), local_.experts() * slots.own * model_.hidden);
  std::vector<std::int64_t> remote;
  for (const std::int64_t rows : shape.peer_rows) remote.push_back(local_.experts() * rows * slots.per_row * model_.hidden);
  const bool to_experts = op.part != Part::experts;
  // What comes back in the forward pass is kept: its product with the output's gradient is the gates' gradient.
  const TensorView mine = !to_experts && op.phase == Phase::forward ? block(op).combine_in : w.own;
  const CommOptions options{op.purpose, to_string(op), Progress::on_wait, static_cast<int>(inputs_.step)};
  Communicator& group = groups_.of(GroupAxis::expert);
  if (to_experts) {
    group.all_to_all(mine.flat(), own, w.remote.flat(), remote, options).wait_host();
  } else {
    group.all_to_all(w.remote.flat(), remote, mine.flat(), own, options).wait_host();
  }
}

}  // namespace tandem

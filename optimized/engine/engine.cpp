// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "optimized/context_parallel/zigzag.h"
#include "optimized/engine/lower.h"
#include "optimized/engine/progress_scope.h"
#include "optimized/engine/step_state.h"

namespace tandem {
namespace {

EngineOptions checked(EngineOptions options) {
  validate(options.model);
  require_legal(options.plan, options.model);
  return options;
}

std::optional<Fp8Scaling> fp8_of(const EngineOptions& options, const PitfallSet& pitfalls) {
  if (!options.plan.numerics.fp8) return std::nullopt;
  return Fp8Scaling(options.plan.fp8, options.model.layers, pitfalls);
}

// Which rows a rank reads follows from its place on the data axis: ranks of one model replica must read the same.
int data_rank(const ProcessGroups& groups, const PitfallSet& pitfalls) {
  if (pitfalls.on(Pitfall::rows_by_world_rank)) return groups.rank() % groups.grid().degrees().data;
  return groups.here().data;
}

// Before the groups are split off: they move what lies there as their world does.
RankContext with_memory(const RankContext& context) {
  TANDEM_CHECK(&context.arena->memory() == &context.kernels->memory() ||
                   (context.arena->memory().on_host() && context.kernels->memory().on_host()),
               "the arena must be in the kernels' memory");
  if (context.kernels->memory().on_host()) return context;
  Communicator* const world = context.world;
  world->set_memory(&context.kernels->memory());
  context.arena->watch({[world](void* address, std::int64_t size_bytes) { world->register_memory(address, size_bytes); },
                        [world](void* address) { world->deregister_memory(address); }});
  return context;
}

// On a device, what compression does is done by the host.
bool needs_host_arena(const RankContext& context, const TrainingPlan& plan) {
  return plan.offload == "optimizer" || (CompressedSync::is_active(plan) && !context.kernels->memory().on_host());
}

}  // namespace

Engine::Engine(const RankContext& context, EngineOptions options)
    : context_(with_memory(context)),
      options_(checked(std::move(options))),
      groups_(*context.world, options_.plan, context.pitfalls),
      host_(needs_host_arena(context, options_.plan) ? std::make_unique<Arena>() : nullptr),
      store_(*context.arena, options_.model, options_.plan, options_.optimizer.kind, context.world->rank(), host_.get(),
             context.pitfalls),
      fp8_(fp8_of(options_, context.pitfalls)),
      stage_(context, options_.model, options_.plan, groups_, store_, fp8_scaling()),
      sync_(context, options_.plan.numerics),
      scaler_(options_.plan.loss_scale, scales_loss_dynamically(options_.plan), scales_loss(options_.plan), context.pitfalls),
      buckets_(buckets_of(options_.plan, store_.parameters())) {
  if (options_.on_activation) {
    stage_.set_output_observer([this](int layer, TensorView output) {
      HostView host(context_.kernels->memory(), output, Access::update);
      options_.on_activation(current_step_, layer, host.view());
      host.finish();
    });
  }
  if (!CompressedSync::is_active(options_.plan)) return;
  Arena& coded = context_.kernels->memory().on_host() ? *context_.arena : *host_;
  compressed_ =
      std::make_unique<CompressedSync>(context_, coded, options_.plan, options_.dropout_seed, groups_, store_.parameters());
}

Engine::~Engine() {
  if (context_.kernels->memory().on_host()) return;
  // A step that was broken off may have put sums off that are members of this.
  const auto try_to = [](const auto& action) {
    try {
      action();
    } catch (const std::exception&) {
      // The device or the world has failed: whoever works with it next is told.
    }
  };
  try_to([&] { context_.kernels->synchronize(); });
  context_.arena->watch({});
  try_to([&] { context_.world->set_memory(nullptr); });  // the world may outlive the kernels
}

StepInputs Engine::inputs_of(const Batch& global_batch, const GlobalBatch& dealt, std::int64_t step, bool training) const {
  TANDEM_CHECK(global_batch.rows == dealt.rows,
               fmt::format("a batch of {} rows for a plan of {}", global_batch.rows, dealt.rows));
  TANDEM_CHECK(global_batch.sequence <= options_.model.sequence,
               fmt::format("rows of {} tokens for a model of {}", global_batch.sequence, options_.model.sequence));
  const LocalModel& local = stage_.local();
  StepInputs inputs;
  inputs.global_rows = global_batch.rows;
  inputs.dropout_seed = options_.dropout_seed;
  const bool forgets = context_.pitfalls.on(Pitfall::random_step_restarts_on_load);
  inputs.step = static_cast<std::uint32_t>(forgets ? step - loaded_updates_ : step);
  inputs.training = training;
  inputs.gradient_scale = scaler_.scale();
  const int rank = data_rank(groups_, context_.pitfalls);
  for (int micro_batch = 0; micro_batch < dealt.micro_batches; ++micro_batch) {
    const Interval rows = micro_batch_rows(dealt.rows, local.data_ranks, rank, dealt.micro_batches, micro_batch);
    MicroBatch next;
    next.batch = context_slice(slice_rows(global_batch, rows.begin, rows.size()), local.context_ranks, local.context_rank);
    validate_tokens(next.batch, options_.model.vocabulary);
    next.shape = micro_batch_shape(local, dealt, global_batch.sequence, micro_batch);
    next.shape.rows = rows.size();
    inputs.micro_batches.push_back(std::move(next));
  }
  return inputs;
}

StepResult Engine::train_step(const Batch& global_batch, std::int64_t step) {
  current_step_ = step;
  StepInputs inputs = inputs_of(global_batch, options_.plan.batch, step, true);
  if (program_sequence_ != global_batch.sequence) {
    program_ = lower(options_.plan, options_.model, global_batch.sequence, groups_.rank(), context_.pitfalls);
    program_sequence_ = global_batch.sequence;
    segments_ = records_graphs() ? graph_segments(program_) : std::vector<GraphSegment>();
    arena_has_grown_ = false;
  }
  SpanScope span(context_.timeline, fmt::format("step {}", step), Activity::step, static_cast<int>(step));
  StepState state{global_batch, step};
  for (const MicroBatch& micro_batch : inputs.micro_batches) {
    state.rank_tokens += static_cast<double>(micro_batch.batch.valid_tokens());
  }
  stage_.begin_step(std::move(inputs));
  state.result.loss_scale = scaler_.scale();
  state.valid_tokens = state.rank_tokens;
  if (groups_.grid().size() == 1) know_tokens(state);
  zero_gradients();
  if (compressed_) compressed_->begin_step(step, scaler_.scale());
  execute_all(state);
  stage_.finish_messages();
  if (groups_.grid().size() == 1) {
    share_totals(state);
    if (fp8_ && !state.result.retry) fp8_->end_step(nullptr);
  }
  if (fp8_ && state.result.retry) fp8_->forget_step();
  if (context_.progress != nullptr) context_.progress->busy_ns.store(busy_ns_, std::memory_order_relaxed);  // of whole steps
  return state.result;
}

// Nothing that needs numbers, waits for messages or looks at tensors while a micro-batch is computed.
bool Engine::records_graphs() const {
  const ParallelDegrees& degrees = options_.plan.parallel;
  const bool alone = degrees.tensor == 1 && degrees.pipeline == 1 && degrees.context == 1;
  return !context_.kernels->memory().on_host() && alone && options_.model.experts == 0 && !fp8_ && !context_.trace &&
         !options_.on_activation && !options_.injected_seconds && !context_.pitfalls.any();
}

void Engine::execute_all(StepState& state) {
  // A reservation would become part of the graph: the first step takes what all of them need.
  auto segment = arena_has_grown_ ? segments_.begin() : segments_.end();
  for (OperationId id = 0; id < std::ssize(program_); ++id) {
    const bool inside = segment != segments_.end() && id >= segment->begin;
    if (inside && id == segment->begin) {
      wait_for_background(program_, program_[static_cast<std::size_t>(id)]);
      context_.kernels->begin_graph(segment->key);
    }
    execute(id, state);
    if (!inside || id + 1 < segment->end) continue;
    context_.kernels->end_graph();
    ++segment;
  }
  arena_has_grown_ = true;
}

void Engine::execute(OperationId id, StepState& state) {
  const Operation& op = program_[static_cast<std::size_t>(id)];
  const ProgressScope progress(context_.progress, op.kind);
  wait_for_background(program_, op);
  switch (op.kind) {
    case OpKind::allocate: allocate(op); break;
    case OpKind::free: free(op); break;
    case OpKind::communicate: communicate(id, op, state); break;
    case OpKind::gradient_norm: finish_gradients(state); break;
    case OpKind::optimizer: update(state); break;
    case OpKind::compute: {
      // Gradients are reduced once, after the last micro-batch: whoever latches the decision before it leaves that one out.
      if (context_.pitfalls.on(Pitfall::last_accumulation_not_reduced) && !state.reduced_early && op.part == Part::head_norm &&
          op.phase == Phase::forward && op.micro_batch == options_.plan.batch.micro_batches - 1) {
        reduce_all_buckets();
        state.reduced_early = true;
      }
      const BusyScope busy(context_.progress, busy_ns_);
      const SpanScope span(context_.timeline, context_.timeline != nullptr ? to_string(op) : std::string(), Activity::compute,
                           static_cast<int>(state.step));
      stage_.compute(op, id + 1 < std::ssize(program_) ? &op + 1 : nullptr);
      if (options_.injected_seconds) {
        std::this_thread::sleep_for(std::chrono::duration<double>(options_.injected_seconds(op)));
      }
      break;
    }
  }
}

void Engine::allocate(const Operation& op) {
  if (op.category == MemoryCategory::parameters) {
    if (context_.pitfalls.on(Pitfall::gathered_weights_stale) && store_.holds_parameters(op.bucket)) return;
    store_.hold_parameters(op.bucket);
  } else if (op.category == MemoryCategory::gradients) {
    store_.hold_gradients(op.bucket);
    context_.kernels->fill(store_.unit_gradients(op.bucket), 0.0);
  } else {
    stage_.allocate(op);
  }
}

void Engine::free(const Operation& op) {
  if (op.category == MemoryCategory::parameters) {
    // What stays after its use saves nothing; what is taken for fresh in the next step is stale.
    if (context_.pitfalls.on(Pitfall::gathered_parameters_kept) || context_.pitfalls.on(Pitfall::gathered_weights_stale)) return;
    store_.drop_parameters(op.bucket);
  } else if (op.category == MemoryCategory::gradients) {
    store_.drop_gradients(op.bucket);
  } else {
    stage_.free(op);
    finish_micro_batch(op);
  }
}

// Planted faults of what happens between two micro-batches; nothing otherwise.
void Engine::finish_micro_batch(const Operation& op) {
  if (op.part != Part::block || op.layer >= 0 || op.phase != Phase::backward_input) return;
  // The loss of every micro-batch carries the divisor of the whole step: whoever rescales the accumulated gradient as well,
  // each time that a micro-batch comes back, makes a moving average of it.
  if (context_.pitfalls.on(Pitfall::gradient_scaled_per_micro_batch)) {
    context_.kernels->scale(store_.all_gradients(), 1.0 / options_.plan.batch.micro_batches);
  }
  // Sums over micro-batches are kept in fp32: in 16 bits, the later ones fall below half a unit in the last place.
  if (context_.pitfalls.on(Pitfall::micro_batches_summed_in_half)) round_gradients_to_storage();
}

void Engine::round_gradients_to_storage() {
  const TensorView gradients = store_.kept_gradients();
  const DType half = is_16bit(store_.storage()) ? store_.storage() : DType::bf16;
  const Arena::Buffer memory = context_.arena->allocate(half, gradients.shape(), MemoryCategory::workspace);
  context_.kernels->convert(gradients, memory.view(half, gradients.shape()));
  context_.kernels->convert(memory.view(half, gradients.shape()), gradients);
}

// What the program leaves in the background goes on until an operation that names it; everything else is waited for at once.
void Engine::start(OperationId id, const Operation& op, UnderWay under_way) {
  if (op.background && !context_.pitfalls.on(Pitfall::overlap_lost_to_blocking_wait)) {
    under_way_.insert_or_assign(id, std::move(under_way));
    return;
  }
  under_way.work.wait_host();
  if (under_way.then) under_way.then();
}

void Engine::wait_for_background(const StepProgram& program, const Operation& op) {
  for (const OperationId before : op.after) {
    if (!program[static_cast<std::size_t>(before)].background) continue;
    auto found = under_way_.extract(before);
    if (found.empty()) continue;  // waited for by an earlier operation
    const ProgressScope waiting(context_.progress, true);
    found.mapped().work.wait_host();
    if (found.mapped().then) found.mapped().then();
  }
}

void Engine::communicate(OperationId id, const Operation& op, StepState& state) {
  if (op.purpose == Purpose::gradient) {
    if (!state.reduced_early || op.bucket < 0) reduce_gradients(id, op, state);
  } else if (op.purpose == Purpose::parameter) {
    gather_parameters(id, op);
  } else if (op.purpose == Purpose::activation) {
    start(id, op, {stage_.communicate(op), {}});
  } else if (op.axis == GroupAxis::gradient || op.axis == GroupAxis::expert_gradient) {
    share_partials(op, state);
  } else if (op.axis == GroupAxis::model) {
    share_norm(state);
  } else if (!state.tokens_known) {
    // Each token counts once: on the tensor and pipeline ranks that share it, the first speaks.
    const bool speaks = groups_.here().tensor == 0 && groups_.here().pipeline == 0;
    state.valid_tokens = all_reduce_sum(groups_.world(), speaks ? state.rank_tokens : 0.0);
    know_tokens(state);
  } else if (state.norm_known && !state.overflow_agreed && scales_loss(options_.plan)) {
    agree_on_overflow(state);
  } else if (!state.totals_shared) {
    share_totals(state);
  } else if (!state.result.retry) {
    fp8_->end_step(&groups_.world(), static_cast<int>(state.step));
  }
}

void Engine::know_tokens(StepState& state) {
  state.tokens_known = true;
  state.result.valid_tokens = static_cast<std::int64_t>(state.valid_tokens);
  for (std::size_t i = 0; i < stage_.inputs().micro_batches.size(); ++i) {
    stage_.set_loss_scale(static_cast<int>(i), loss_scale(stage_.inputs().micro_batches[i].batch, state));
  }
}

double Engine::loss_scale(const Batch& part, const StepState& state) const {
  if (state.valid_tokens == 0) return 0.0;
  const double scale = stage_.inputs().gradient_scale;
  // Every token counts the same: one divisor for all ranks and micro-batches. Means of means weigh tokens of short rows more.
  const auto part_tokens = static_cast<double>(std::max<std::int64_t>(1, part.valid_tokens()));
  if (context_.pitfalls.on(Pitfall::mean_of_micro_batch_means)) {
    return scale * state.rank_tokens / state.valid_tokens / (part_tokens * options_.plan.batch.micro_batches);
  }
  if (context_.pitfalls.on(Pitfall::mean_of_rank_means)) {
    return scale / (std::max(1.0, state.rank_tokens) * options_.plan.parallel.data);
  }
  return scale / state.valid_tokens;
}

void Engine::share_totals(StepState& state) {
  state.totals_shared = true;
  context_.kernels->synchronize();  // adds what the loss has put off
  const StageTotals own = stage_.take_totals();
  std::vector<double> sums = {own.loss_sum, own.auxiliary_loss, static_cast<double>(own.kept), static_cast<double>(own.dropped)};
  if (options_.model.experts == 0) sums.resize(1);
  // Tensor ranks have computed the same numbers.
  if (groups_.here().tensor != 0) std::fill(sums.begin(), sums.end(), 0.0);
  if (groups_.grid().size() > 1) all_reduce(groups_.world(), view_of(sums, {std::ssize(sums)}), {Purpose::other, "loss"});
  state.result.loss = state.valid_tokens > 0 ? sums[0] / state.valid_tokens : 0.0;
  if (options_.model.experts == 0) return;
  state.result.auxiliary_loss = sums[1];
  state.result.kept_assignments = static_cast<std::int64_t>(sums[2]);
  state.result.dropped_assignments = static_cast<std::int64_t>(sums[3]);
}

std::vector<std::int64_t> Engine::rows() const {
  std::vector<std::int64_t> rows;
  for (const MicroBatch& micro_batch : stage_.inputs().micro_batches) {
    rows.insert(rows.end(), micro_batch.batch.row_ids.begin(), micro_batch.batch.row_ids.end());
  }
  return rows;
}

double Engine::evaluate(const Batch& global_batch) {
  const std::pair<std::int64_t, std::int64_t> shape{global_batch.rows, global_batch.sequence};
  if (evaluation_shape_ != shape) {
    evaluation_ = lower_evaluation(options_.plan, options_.model, shape.first, shape.second, groups_.rank());
    evaluation_shape_ = shape;
  }
  StepInputs inputs = inputs_of(global_batch, {global_batch.rows, options_.plan.batch.micro_batches}, 0, false);
  double tokens = 0;
  for (const MicroBatch& micro_batch : inputs.micro_batches) tokens += static_cast<double>(micro_batch.batch.valid_tokens());
  stage_.begin_step(std::move(inputs));
  for (OperationId id = 0; id < std::ssize(evaluation_); ++id) {
    const Operation& op = evaluation_[static_cast<std::size_t>(id)];
    const ProgressScope progress(context_.progress, op.kind);
    wait_for_background(evaluation_, op);
    switch (op.kind) {
      case OpKind::allocate: allocate(op); break;
      case OpKind::free: free(op); break;
      case OpKind::compute: stage_.compute(op, id + 1 < std::ssize(evaluation_) ? &op + 1 : nullptr); break;
      case OpKind::communicate:
        if (op.purpose == Purpose::activation) start(id, op, {stage_.communicate(op), {}});
        if (op.purpose == Purpose::parameter) gather_parameters(id, op);
        break;
      default: break;
    }
  }
  stage_.finish_messages();
  context_.kernels->synchronize();
  const Coordinates here = groups_.here();
  const double loss_sum = stage_.take_totals().loss_sum;
  std::vector<double> sums = {here.tensor == 0 ? loss_sum : 0.0, here.tensor == 0 && here.pipeline == 0 ? tokens : 0.0};
  if (groups_.grid().size() > 1) all_reduce(groups_.world(), view_of(sums, {2}), {Purpose::other, "evaluation"});
  return sums[1] > 0 ? sums[0] / sums[1] : 0.0;
}

}  // namespace tandem

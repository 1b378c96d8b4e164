// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/engine.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "optimized/engine/lower.h"
#include "optimized/engine/optimizer.h"

namespace tandem {
namespace {

EngineOptions checked(EngineOptions options, int data_ranks) {
  validate(options.model);
  require_legal(options.plan, options.model);
  TANDEM_CHECK(options.plan.parallel.data == data_ranks,
               fmt::format("a plan for {} data ranks on a communicator of {}", options.plan.parallel.data, data_ranks));
  return options;
}

}  // namespace

struct Engine::StepState {
  const Batch& batch;
  std::int64_t step;
  Batch rows;                  // of this rank
  std::int64_t first_row = 0;  // of this rank in the global batch
  int micro_batch = -1;
  double valid_tokens = 0;  // this rank's, then of the whole global batch
  double rank_tokens = 0;
  bool tokens_known = false;
  bool reduced_early = false;  // pitfall
  double loss_sum = 0;
  StepResult result{};
};

Engine::Engine(const RankContext& context, EngineOptions options)
    : context_(context),
      options_(checked(std::move(options), context.data->size())),
      store_(*context.arena, options_.model, options_.plan, options_.optimizer.kind),
      stage_(context, options_.model, store_),
      sync_(context, options_.plan.numerics),
      buckets_(gradient_buckets(store_.specs(), options_.plan.buckets.bucket_bytes,
                                static_cast<std::int64_t>(size_bytes(options_.plan.numerics.accumulate)))) {}

StepResult Engine::train_step(const Batch& global_batch, std::int64_t step) {
  const int ranks = context_.data->size();
  const int rank = context_.data->rank();
  TANDEM_CHECK(global_batch.rows == options_.plan.batch.rows,
               fmt::format("a batch of {} rows for a plan of {}", global_batch.rows, options_.plan.batch.rows));
  TANDEM_CHECK(global_batch.sequence <= options_.model.sequence,
               fmt::format("rows of {} tokens for a model of {}", global_batch.sequence, options_.model.sequence));
  if (program_sequence_ != global_batch.sequence) {
    program_ = lower(options_.plan, options_.model, global_batch.sequence, rank);
    program_sequence_ = global_batch.sequence;
  }
  SpanScope span(context_.timeline, fmt::format("step {}", step), Activity::step, static_cast<int>(step));
  const Interval rows = balanced_part(global_batch.rows, ranks, rank);
  StepState state{global_batch, step, slice_rows(global_batch, rows.begin, rows.size()), rows.begin};
  validate_tokens(state.rows, options_.model.vocabulary);
  state.rank_tokens = state.valid_tokens = static_cast<double>(state.rows.valid_tokens());
  state.tokens_known = ranks == 1;
  zero_gradients();
  for (const Operation& operation : program_) execute(operation, state);
  if (ranks == 1) state.result.loss = state.valid_tokens > 0 ? state.loss_sum / state.valid_tokens : 0.0;
  state.result.valid_tokens = static_cast<std::int64_t>(state.valid_tokens);
  return state.result;
}

void Engine::execute(const Operation& op, StepState& state) {
  if (op.micro_batch >= 0 && op.micro_batch != state.micro_batch) {
    state.micro_batch = op.micro_batch;
    begin_micro_batch(op.micro_batch, state);
  }
  switch (op.kind) {
    case OpKind::allocate: stage_.allocate(op); break;
    case OpKind::free: stage_.free(op); break;
    case OpKind::communicate: communicate(op, state); break;
    case OpKind::gradient_norm: finish_gradients(state); break;
    case OpKind::optimizer: update(state); break;
    case OpKind::compute: {
      // Gradients are reduced once, after the last micro-batch: whoever latches the decision before it leaves that one out.
      if (context_.pitfalls.on(Pitfall::last_accumulation_not_reduced) && !state.reduced_early && context_.data->size() > 1 &&
          op.part == Part::head && op.micro_batch == options_.plan.batch.micro_batches - 1) {
        for (std::size_t i = 0; i < buckets_.size(); ++i) reduce_bucket(static_cast<int>(i));
        state.reduced_early = true;
      }
      const SpanScope span(context_.timeline, context_.timeline != nullptr ? to_string(op) : std::string(), Activity::compute,
                           static_cast<int>(state.step));
      stage_.compute(op);
      state.loss_sum += stage_.take_loss_sum();
      break;
    }
  }
}

void Engine::begin_micro_batch(int micro_batch, const StepState& state) {
  const Interval part = micro_batch_rows(state.batch.rows, context_.data->size(), context_.data->rank(),
                                         options_.plan.batch.micro_batches, micro_batch);
  MicroBatch next;
  next.batch = slice_rows(state.rows, part.begin - state.first_row, part.size());
  next.loss_scale = loss_scale(next.batch, state);
  next.dropout_seed = options_.dropout_seed;
  next.step = static_cast<std::uint32_t>(state.step);
  stage_.begin_micro_batch(std::move(next));
}

double Engine::loss_scale(const Batch& part, const StepState& state) const {
  TANDEM_CHECK(state.tokens_known, "the valid tokens of the global batch come first");
  if (state.valid_tokens == 0) return 0.0;
  // Every token counts the same: one divisor for all ranks and micro-batches. Means of means weigh tokens of short rows more.
  const auto part_tokens = static_cast<double>(std::max<std::int64_t>(1, part.valid_tokens()));
  if (context_.pitfalls.on(Pitfall::mean_of_micro_batch_means)) {
    return state.rank_tokens / state.valid_tokens / (part_tokens * options_.plan.batch.micro_batches);
  }
  if (context_.pitfalls.on(Pitfall::mean_of_rank_means)) {
    return 1.0 / (std::max(1.0, state.rank_tokens) * context_.data->size());
  }
  return 1.0 / state.valid_tokens;
}

void Engine::communicate(const Operation& op, StepState& state) {
  if (op.purpose == Purpose::gradient) {
    if (!state.reduced_early) reduce_bucket(op.bucket);
    return;
  }
  if (!state.tokens_known) {
    state.valid_tokens = all_reduce_sum(*context_.data, state.valid_tokens);
    state.tokens_known = true;
    return;
  }
  const double sum = all_reduce_sum(*context_.data, state.loss_sum);
  state.result.loss = state.valid_tokens > 0 ? sum / state.valid_tokens : 0.0;
}

void Engine::zero_gradients() {
  if (!context_.pitfalls.on(Pitfall::gradient_never_written)) {
    context_.kernels->fill(store_.all_gradients(), 0.0);
    return;
  }
  for (std::size_t i = 0; i < store_.specs().size(); ++i) {
    if (store_.specs()[i].name != "h.0.mlp.c_fc.bias") context_.kernels->fill(store_.gradient(i), 0.0);
  }
}

void Engine::reduce_bucket(int bucket) {
  if (context_.pitfalls.on(Pitfall::all_reduce_dropped)) return;
  const Interval range = buckets_[static_cast<std::size_t>(bucket)].elements;
  sync_.reduce(store_.all_gradients().flat(range.begin, range.size()), bucket);
}

void Engine::finish_gradients(StepState& state) {
  if (context_.pitfalls.on(Pitfall::gradient_off_by_a_little)) {
    context_.kernels->scale(store_.gradient(store_.index_of("h.0.attn.c_proj.weight")), 1.003);
  }
  const int last_rank = context_.data->size() - 1;
  if (context_.pitfalls.on(Pitfall::last_rank_gradient_scaled) && last_rank > 0 && context_.data->rank() == last_rank) {
    context_.kernels->scale(store_.gradient(store_.index_of("ln_f.weight")), 1.01);
  }
  if (gradient_observer_) gradient_observer_(*this);
  const SpanScope span(context_.timeline, "gradient_norm", Activity::optimizer, static_cast<int>(state.step));
  state.result.gradient_norm = gradient_norm(context_, store_);
  state.result.clip_coefficient = clip_coefficient(options_.optimizer, state.result.gradient_norm, context_.pitfalls);
}

void Engine::update(StepState& state) {
  const SpanScope span(context_.timeline, "optimizer", Activity::optimizer, static_cast<int>(state.step));
  state.result.learning_rate = scheduled_learning_rate(options_.optimizer, options_.schedule, state.step, options_.total_steps);
  ++updates_;
  // Frozen twins agree perfectly; only a check that something moved can tell.
  const double rate = context_.pitfalls.on(Pitfall::both_sides_frozen) ? 0.0 : state.result.learning_rate;
  update_parameters(context_, options_.optimizer, rate, state.result.clip_coefficient, updates_, store_);
}

double Engine::evaluate(const Batch& global_batch) {
  const Interval rows = balanced_part(global_batch.rows, context_.data->size(), context_.data->rank());
  const Batch part = slice_rows(global_batch, rows.begin, rows.size());
  validate_tokens(part, options_.model.vocabulary);
  const double sum = all_reduce_sum(*context_.data, stage_.evaluate(part));
  const double tokens = all_reduce_sum(*context_.data, static_cast<double>(part.valid_tokens()));
  return tokens > 0 ? sum / tokens : 0.0;
}

}  // namespace tandem

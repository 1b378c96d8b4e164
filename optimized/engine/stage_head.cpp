// SPDX-License-Identifier: Apache-2.0
// logits = ln_f(h) head^T and their cross-entropy, a piece of the tokens at a time: logits become their own gradient and are used
// up at once, so that the whole [tokens, vocabulary] never exists. Tensor ranks hold columns of the logits.
#include "optimized/engine/gpt_stage.h"
#include "optimized/tensor_parallel/vocabulary_loss.h"

namespace tandem {

void GptStage::head_norm(const Operation& op) {
  Kernels& k = *context_.kernels;
  const HeadActivations a = head(op);
  const TensorView in = chunk_output(op);
  const std::size_t norm = *final_norm_;
  if (op.phase == Phase::forward) {
    const TensorView out = slice_of(op, a.norm_out);
    k.layer_norm_forward(in, parameter(norm), parameter(norm + 1), model_.layer_norm_epsilon, out, a.mean, a.rstd);
    trace_hidden(op, "ln_f", out, Tokens::slice);
    return;
  }
  const TensorView dy = slice_of(op, head_gradient(op));
  if (op.phase == Phase::backward_weight) {
    k.layer_norm_backward_weight(dy, in, a.mean, a.rstd, gradient(norm), gradient(norm + 1));
    return;
  }
  trace_hidden(op, "ln_f", dy, Tokens::slice);
  k.layer_norm_backward_input(dy, in, parameter(norm), a.mean, a.rstd, {}, stream(op));
}

// Column of each target in the local logits, negative where another rank has it or the target takes no part.
std::vector<std::int32_t> GptStage::local_targets(const Operation& op, Interval tokens) const {
  const Interval part = local_.vocabulary_part();
  std::vector<std::int32_t> columns;
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    const std::int32_t target = targets_of(op)[static_cast<std::size_t>(t)];
    columns.push_back(target >= part.begin && target < part.end ? static_cast<std::int32_t>(target - part.begin) : -1);
  }
  return columns;
}

// Labels travel with their own micro-batch: taken from a queue of their own, they can be those of another.
const std::vector<std::int32_t>& GptStage::targets_of(const Operation& op) const {
  const auto count = static_cast<int>(inputs_.micro_batches.size());
  const std::vector<std::int32_t>& other = at((op.micro_batch + 1) % count).batch.targets;
  const std::vector<std::int32_t>& own = at(op.micro_batch).batch.targets;
  return context_.pitfalls.on(Pitfall::labels_of_another_micro_batch) && other.size() == own.size() ? other : own;
}

void GptStage::head_logits(const Operation& op) {
  const Interval tokens = head_piece(at(op.micro_batch).shape, op.piece);
  const HeadWorkspace w = head_workspace(op);
  const TensorView logits = w.logits.rows(0, tokens.size());
  context_.kernels->head_forward(head(op).norm_out.rows(tokens.begin, tokens.size()), parameter(head_index()), logits);
  trace_logits(op, "logits", logits, tokens);
  if (local_.tensor_ranks == 1) return;
  const bool all_rows = context_.pitfalls.on(Pitfall::padding_in_softmax);  // padding is no token
  context_.kernels->cross_entropy_statistics(logits, all_rows ? local_.vocabulary_rows() : local_.vocabulary_part().size(),
                                             local_targets(op, tokens), w.statistics.rows(0, tokens.size()));
}

void GptStage::gather_statistics(const Operation& op) {
  const Interval tokens = head_piece(at(op.micro_batch).shape, op.piece);
  const HeadWorkspace w = head_workspace(op);
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(local_.tensor_ranks), 3 * tokens.size());
  groups_.of(GroupAxis::tensor)
      .all_gather(w.statistics.flat(0, 3 * tokens.size()), w.gathered.flat(0, local_.tensor_ranks * 3 * tokens.size()), counts,
                  {op.purpose, to_string(op), Progress::on_wait, static_cast<int>(inputs_.step)})
      .wait_host();
}

void GptStage::head_loss(const Operation& op) {
  Kernels& k = *context_.kernels;
  const Interval tokens = head_piece(at(op.micro_batch).shape, op.piece);
  const HeadWorkspace w = head_workspace(op);
  const TensorView logits = w.logits.rows(0, tokens.size());
  const std::span<const std::int32_t> targets =
      std::span(targets_of(op)).subspan(static_cast<std::size_t>(tokens.begin), static_cast<std::size_t>(tokens.size()));
  const double scale = at(op.micro_batch).loss_scale;
  if (local_.tensor_ranks == 1) {
    if (inputs_.training) {
      k.cross_entropy_deferred(logits, targets, scale, totals_.loss_sum);
    } else {
      totals_.loss_sum += k.cross_entropy_forward(logits, targets);
    }
  } else {
    const std::int64_t count = tokens.size();
    const TensorView logsumexp = w.logsumexp.rows(0, count);
    const TensorView target_logit = w.target_logit.rows(0, count);
    const TensorView gathered = w.gathered.flat(0, local_.tensor_ranks * count * 3).reshaped({local_.tensor_ranks, count, 3});
    totals_.loss_sum += merged_loss(k.memory(), gathered, logsumexp, target_logit, targets);
    if (inputs_.training) vocabulary_gradient(op, tokens, targets, logits, logsumexp);
  }
  if (!inputs_.training) return;
  trace_logits(op, "d.logits", logits, tokens);
  k.head_backward_input(logits, parameter(head_index()), head_gradient(op).rows(tokens.begin, tokens.size()));
  k.head_backward_weight(head(op).norm_out.rows(tokens.begin, tokens.size()), logits, gradient(head_index()));
}

// Without the columns of padding.
void GptStage::trace_logits(const Operation& op, std::string_view what, TensorView logits, Interval tokens) const {
  if (!tracing()) return;
  const std::int64_t columns = local_.vocabulary_part().size();
  const std::int64_t width = local_.vocabulary_rows();
  const Arena::Buffer memory = context_.arena->allocate(dtype_, {tokens.size() * columns}, MemoryCategory::workspace);
  const auto element = static_cast<std::int64_t>(size_bytes(dtype_));
  context_.kernels->memory().copy_rows(logits.data(), width * element, memory.data(), columns * element, columns * element,
                                       tokens.size());
  trace_rows(op, std::string(what), memory.view(dtype_, {tokens.size(), columns}), tokens, {local_.vocabulary_part()},
             model_.vocabulary);
}

void GptStage::vocabulary_gradient(const Operation& op, Interval tokens, std::span<const std::int32_t> targets, TensorView logits,
                                   TensorView logsumexp) {
  const std::vector<std::int32_t> columns = local_targets(op, tokens);
  std::vector<std::uint8_t> valid;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    // Every rank has a softmax term of every valid token, whoever owns the target.
    const bool skipped = context_.pitfalls.on(Pitfall::softmax_term_skipped_off_owner) && columns[t] < 0;
    valid.push_back(targets[t] != kIgnoredTarget && !skipped ? 1 : 0);
  }
  const bool all_rows = context_.pitfalls.on(Pitfall::padding_in_softmax);
  context_.kernels->cross_entropy_gradient(logits, all_rows ? local_.vocabulary_rows() : local_.vocabulary_part().size(), columns,
                                           valid, logsumexp, at(op.micro_batch).loss_scale);
}

}  // namespace tandem

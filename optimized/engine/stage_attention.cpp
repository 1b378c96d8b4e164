// SPDX-License-Identifier: Apache-2.0
// middle = h + dropout(c_proj(attention(c_attn(ln_1(h))))): heads are dealt to tensor ranks, so c_attn is column-parallel and
// c_proj row-parallel.
#include <utility>

#include "optimized/engine/stage_pieces.h"

namespace tandem {

AttentionShape GptStage::attention_shape(const Operation& op) const {
  const Batch& batch = at(op.micro_batch).batch;
  AttentionShape shape{batch.rows, batch.sequence, local_.heads(), model_.head_size(), batch.document_starts, model_.sequence};
  shape.total_heads = model_.heads;
  // A head's mask belongs to its place in the whole model: keyed by its place on the rank, all tensor ranks draw the same masks.
  shape.first_head =
      context_.pitfalls.on(Pitfall::attention_dropout_keyed_by_local_head) ? 0 : local_.tensor_rank * local_.heads();
  return shape;
}

void GptStage::norm_1(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockParameters& p = parameters_of(op.layer);
  const BlockActivations a = block(op);
  const TensorView in = block_input(op);
  if (op.phase == Phase::forward) {
    const TensorView out = slice_of(op, a.norm1_out);
    k.layer_norm_forward(in, parameter(p.norm1_weight), parameter(p.norm1_bias), model_.layer_norm_epsilon, out, a.norm1_mean,
                         a.norm1_rstd);
    trace_hidden(op, "ln_1", out, Tokens::slice);
    return;
  }
  const TensorView dy = slice_of(op, block_gradients(op).norm1_out);
  trace_hidden(op, "ln_1", dy, Tokens::slice);
  k.layer_norm_backward_input(dy, in, parameter(p.norm1_weight), a.norm1_mean, a.norm1_rstd, stream(op), stream(op));
}

void GptStage::attention_in(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockParameters& p = parameters_of(op.layer);
  const BlockActivations a = block(op);
  const bool forward = op.phase == Phase::forward;
  const BlockGradients g = forward ? BlockGradients{} : block_gradients(op);
  const Fp8Linear linear = Fp8Linear::c_attn;
  const Narrowed weight = operand(op, linear, Fp8Operand::w, parameter(p.qkv_weight));
  if (forward) {
    k.linear_forward(operand(op, linear, Fp8Operand::x, a.norm1_out).values, weight.values, parameter(p.qkv_bias), a.qkv);
  }
  if (!forward && op.piece == 0 && local_.context_ranks > 1) take_home_key_value_gradients(op);
  if (tracing() && op.piece == 0) {
    const std::int64_t width = local_.attention_width();
    std::vector<Interval> columns;
    for (std::int64_t third = 0; third < 3; ++third) {
      const std::int64_t begin = third * model_.hidden + local_.tensor_rank * width;
      columns.push_back({begin, begin + width});
    }
    trace(op, traced_name(op, "attn.c_attn"), forward ? a.qkv : g.qkv, Tokens::all, std::move(columns), 3 * model_.hidden);
  }
  if (forward) return;
  for_tokens_of_piece(op, g.norm1_out, [&](Interval tokens, TensorView out) {
    k.linear_backward_input(operand(op, linear, Fp8Operand::dy, rows_of(g.qkv, tokens)).values, weight.values, out);
  });
}

void GptStage::whole_attention(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockActivations a = block(op);
  const bool forward = op.phase == Phase::forward;
  const BlockGradients g = forward ? BlockGradients{} : block_gradients(op);
  const AttentionShape shape = attention_shape(op);
  const DropoutSpec dropout = attention_dropout(op);
  if (local_.materialized_attention) {
    forward ? k.attention_materialized_forward(shape, dropout, a.qkv, a.attention_out, a.attention_probabilities)
            : k.attention_materialized_backward(shape, dropout, g.attention_out, a.qkv, a.attention_probabilities, g.qkv);
  } else {
    forward ? k.attention_forward(shape, dropout, a.qkv, a.attention_out, a.logsumexp)
            : k.attention_backward(shape, dropout, g.attention_out, a.qkv, a.attention_out, a.logsumexp, g.qkv);
  }
}

void GptStage::attention_core(const Operation& op) {
  const bool forward = op.phase == Phase::forward;
  if (local_.context_ranks > 1) {
    forward ? ring_forward(op) : ring_backward(op);
  } else {
    whole_attention(op);
  }
  if (!forward || op.piece + 1 < local_.context_ranks || !tracing()) return;
  const std::int64_t width = local_.attention_width();
  trace(op, traced_name(op, "attn"), block(op).attention_out, Tokens::all,
        {{local_.tensor_rank * width, (local_.tensor_rank + 1) * width}}, model_.hidden);
}

void GptStage::attention_out(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockParameters& p = parameters_of(op.layer);
  const BlockActivations a = block(op);
  const Fp8Linear linear = Fp8Linear::attn_c_proj;
  const Narrowed weight = operand(op, linear, Fp8Operand::w, parameter(p.projection_weight));
  if (op.phase == Phase::forward) {
    // The bias of a row-parallel layer is added once, after the sum: added before it, every tensor rank adds it.
    const bool early = local_.tensor_ranks == 1 || context_.pitfalls.on(Pitfall::row_bias_on_every_rank);
    const TensorView out = local_.sequence_parallel ? workspace(op).partial : a.middle;
    for_tokens_of_piece(op, out, [&](Interval tokens, TensorView part) {
      k.linear_forward(operand(op, linear, Fp8Operand::x, rows_of(a.attention_out, tokens)).values, weight.values,
                       early ? parameter(p.projection_bias) : TensorView(), part);
    });
    return;
  }
  const BlockGradients g = block_gradients(op);
  k.linear_backward_input(operand(op, linear, Fp8Operand::dy, g.attention_projection).values, weight.values, g.attention_out);
  if (!tracing()) return;
  const std::int64_t width = local_.attention_width();
  trace(op, traced_name(op, "attn"), g.attention_out, Tokens::all,
        {{local_.tensor_rank * width, (local_.tensor_rank + 1) * width}}, model_.hidden);
}

void GptStage::attention_merge(const Operation& op) {
  Kernels& k = *context_.kernels;
  const DropoutSpec dropout = residual_dropout(op, DropoutSite::attention_residual, model_.residual_dropout);
  if (op.phase == Phase::forward) {
    const TensorView middle = block(op).middle;
    const bool added = local_.tensor_ranks == 1 || context_.pitfalls.on(Pitfall::row_bias_on_every_rank);
    if (!added) k.add_bias(parameter(parameters_of(op.layer).projection_bias), middle);
    trace_hidden(op, "attn.c_proj", middle, Tokens::slice);
    if (norm_2_follows_) {
      const BlockActivations a = block(op);
      const BlockParameters& p = parameters_of(op.layer);
      k.dropout_residual_norm_forward(dropout, middle, block_input(op), middle, parameter(p.norm2_weight),
                                      parameter(p.norm2_bias), model_.layer_norm_epsilon, slice_of(op, a.norm2_out), a.norm2_mean,
                                      a.norm2_rstd);
      norm_2_done_ = true;
      return;
    }
    k.dropout_residual_forward(dropout, middle, block_input(op), middle);
    trace_hidden(op, "middle", middle, Tokens::slice);
    return;
  }
  const TensorView branch = slice_of(op, block_gradients(op).attention_projection);
  k.dropout_backward(dropout, stream(op), branch);
  trace_hidden(op, "attn.c_proj", branch, Tokens::slice);
}

void GptStage::norm_2(const Operation& op) {
  if (std::exchange(norm_2_done_, false)) return;
  Kernels& k = *context_.kernels;
  const BlockParameters& p = parameters_of(op.layer);
  const BlockActivations a = block(op);
  if (op.phase == Phase::forward) {
    const TensorView out = slice_of(op, a.norm2_out);
    k.layer_norm_forward(a.middle, parameter(p.norm2_weight), parameter(p.norm2_bias), model_.layer_norm_epsilon, out,
                         a.norm2_mean, a.norm2_rstd);
    trace_hidden(op, "ln_2", out, Tokens::slice);
    return;
  }
  const TensorView dy = slice_of(op, block_gradients(op).norm2_out);
  trace_hidden(op, "ln_2", dy, Tokens::slice);
  k.layer_norm_backward_input(dy, a.middle, parameter(p.norm2_weight), a.norm2_mean, a.norm2_rstd, stream(op), stream(op));
  trace_hidden(op, "middle", stream(op), Tokens::slice);
}

void GptStage::block_weights(const Operation& op) {
  // A schedule that splits the backward pass owes the weight part of every micro-batch.
  if (context_.pitfalls.on(Pitfall::weight_part_skipped_once) && op.micro_batch == 1) return;
  model_.experts == 0 ? mlp_weights(op) : expert_weights(op);
  if (at(op.micro_batch).batch.rows == 0) return;
  Kernels& k = *context_.kernels;
  const BlockParameters& p = parameters_of(op.layer);
  const BlockActivations a = block(op);
  const BlockGradients g = block_gradients(op);
  k.layer_norm_backward_weight(slice_of(op, g.norm2_out), a.middle, a.norm2_mean, a.norm2_rstd, gradient(p.norm2_weight),
                               gradient(p.norm2_bias));
  row_parallel_weights(op, Fp8Linear::attn_c_proj, a.attention_out, g.attention_projection, gradient(p.projection_weight),
                       gradient(p.projection_bias));
  linear_weights(op, Fp8Linear::c_attn, a.norm1_out, g.qkv, gradient(p.qkv_weight), gradient(p.qkv_bias));
  k.layer_norm_backward_weight(slice_of(op, g.norm1_out), block_input(op), a.norm1_mean, a.norm1_rstd, gradient(p.norm1_weight),
                               gradient(p.norm1_bias));
}

// A bias is not an operand of a product: its gradient is the sum of dy as it is.
void GptStage::linear_weights(const Operation& op, Fp8Linear linear, TensorView x, TensorView dy, TensorView dweight,
                              TensorView dbias) {
  Kernels& k = *context_.kernels;
  if (fp8_ == nullptr) {
    k.linear_backward_weight(x, dy, dweight, dbias);
    return;
  }
  k.linear_backward_weight(operand(op, linear, Fp8Operand::x, x).values, operand(op, linear, Fp8Operand::dy, dy).values, dweight,
                           {});
  if (dbias) k.bias_backward(dy, dbias);
}

GptStage::Narrowed GptStage::operand(const Operation& op, Fp8Linear linear, Fp8Operand which, TensorView values) {
  if (fp8_ == nullptr) return {{}, values};
  const Fp8Slot slot{op.layer, linear, which};
  Narrowed result{context_.arena->allocate(values.dtype(), values.shape(), MemoryCategory::workspace), {}};
  result.values = result.memory.view(values.dtype(), values.shape());
  const double largest = context_.kernels->quantize_fp8(values, format_of(which), fp8_->scale(slot), result.values);
  if (inputs_.training) fp8_->observe(slot, largest);
  return result;
}

// x is this tensor rank's part of the layer's input, dy the gradient of the summed output: whole on every rank, so that of the
// bias is too, but under sequence parallelism each rank adds up its slice alone.
void GptStage::row_parallel_weights(const Operation& op, Fp8Linear linear, TensorView x, TensorView dy, TensorView dweight,
                                    TensorView dbias) {
  Kernels& k = *context_.kernels;
  const bool divided = context_.pitfalls.on(Pitfall::row_bias_divided) && local_.tensor_ranks > 1;
  if (!local_.sequence_parallel && !divided) {
    linear_weights(op, linear, x, dy, dweight, dbias);
    return;
  }
  linear_weights(op, linear, x, dy, dweight, {});
  if (!divided) {
    k.bias_backward(slice_of(op, dy), dbias);
    return;
  }
  // bias / T added on each of T ranks before the sum: the forward pass is right, the gradient T times too small.
  const Arena::Buffer memory = context_.arena->allocate(dbias.dtype(), dbias.shape(), MemoryCategory::workspace);
  const TensorView part = memory.view(dbias.dtype(), dbias.shape());
  k.fill(part, 0.0);
  k.bias_backward(slice_of(op, dy), part);
  k.scale(part, 1.0 / local_.tensor_ranks);
  k.add(part, dbias);
}

}  // namespace tandem

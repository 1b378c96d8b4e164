// SPDX-License-Identifier: Apache-2.0
// out = middle + dropout(c_proj(gelu(c_fc(ln_2(middle))))): c_fc is column-parallel, c_proj row-parallel.
#include "optimized/engine/stage_pieces.h"

namespace tandem {

// Everything in it is done token by token, so that a piece of it is the whole chain for some tokens.
void GptStage::mlp(const Operation& op) {
  const BlockActivations a = block(op);
  if (recomputing_ && storage_of(op, op.layer).inside) {
    context_.kernels->gelu_forward(a.fc_out, a.gelu_out);
    return;
  }
  op.phase == Phase::forward ? mlp_forward(op, a) : mlp_backward_input(op, a);
}

void GptStage::trace_wide(const Operation& op, std::string_view what, TensorView values, Interval tokens) const {
  const std::int64_t width = local_.mlp_width();
  if (!tracing()) return;
  trace_rows(op, traced_name(op, what), values, tokens, {{local_.tensor_rank * width, (local_.tensor_rank + 1) * width}},
             model_.mlp_width());
}

void GptStage::mlp_forward(const Operation& op, const BlockActivations& a) {
  Kernels& k = *context_.kernels;
  const BlockParameters::Mlp& p = parameters_of(op.layer).mlps.front();
  const Narrowed fc_weight = operand(op, Fp8Linear::c_fc, Fp8Operand::w, parameter(p.fc_weight));
  const Narrowed projection_weight = operand(op, Fp8Linear::mlp_c_proj, Fp8Operand::w, parameter(p.projection_weight));
  const bool early = local_.tensor_ranks == 1 || context_.pitfalls.on(Pitfall::row_bias_on_every_rank);
  const auto first_product = [&](Interval tokens) {
    const TensorView fc_out = rows_of(a.fc_out, tokens), gelu_out = rows_of(a.gelu_out, tokens);
    k.linear_gelu_forward(operand(op, Fp8Linear::c_fc, Fp8Operand::x, rows_of(a.norm2_out, tokens)).values, fc_weight.values,
                          parameter(p.fc_bias), fc_out, gelu_out);
    trace_wide(op, "mlp.c_fc", fc_out, tokens);
    trace_wide(op, "mlp.gelu", gelu_out, tokens);
  };
  if (recomputing_ && storage_of(op, op.layer).out) {  // the output was kept
    first_product({0, at(op.micro_batch).shape.tokens()});
    return;
  }
  for_tokens_of_piece(op, local_.sequence_parallel ? workspace(op).partial : a.out, [&](Interval tokens, TensorView out) {
    first_product(tokens);
    k.linear_forward(operand(op, Fp8Linear::mlp_c_proj, Fp8Operand::x, rows_of(a.gelu_out, tokens)).values,
                     projection_weight.values, early ? parameter(p.projection_bias) : TensorView(), out);
  });
}

void GptStage::mlp_backward_input(const Operation& op, const BlockActivations& a) {
  Kernels& k = *context_.kernels;
  const BlockParameters::Mlp& p = parameters_of(op.layer).mlps.front();
  const BlockGradients g = block_gradients(op);
  const Narrowed fc_weight = operand(op, Fp8Linear::c_fc, Fp8Operand::w, parameter(p.fc_weight));
  const Narrowed projection_weight = operand(op, Fp8Linear::mlp_c_proj, Fp8Operand::w, parameter(p.projection_weight));
  for_tokens_of_piece(op, g.norm2_out, [&](Interval tokens, TensorView out) {
    const TensorView wide = rows_of(g.fc_out, tokens);
    k.linear_backward_input(operand(op, Fp8Linear::mlp_c_proj, Fp8Operand::dy, rows_of(g.mlp_out, tokens)).values,
                            projection_weight.values, wide);
    trace_wide(op, "mlp.gelu", wide, tokens);
    k.gelu_backward(wide, rows_of(a.fc_out, tokens), wide);
    trace_wide(op, "mlp.c_fc", wide, tokens);
    k.linear_backward_input(operand(op, Fp8Linear::c_fc, Fp8Operand::dy, wide).values, fc_weight.values, out);
  });
}

void GptStage::mlp_merge(const Operation& op) {
  Kernels& k = *context_.kernels;
  const DropoutSpec dropout = residual_dropout(op, DropoutSite::mlp_residual, model_.residual_dropout);
  const std::string_view branch_name = model_.experts == 0 ? "mlp.c_proj" : "mlp";
  if (op.phase == Phase::forward) {
    const BlockActivations a = block(op);
    const bool added = local_.tensor_ranks == 1 || model_.experts > 0 || context_.pitfalls.on(Pitfall::row_bias_on_every_rank);
    if (!added) k.add_bias(parameter(parameters_of(op.layer).mlps.front().projection_bias), a.out);
    trace_hidden(op, branch_name, a.out, Tokens::slice);
    k.dropout_residual_forward(dropout, a.out, a.middle, a.out);
    if (output_observer_ && inputs_.training && !recomputing_) output_observer_(op.layer, a.out);
    trace_hidden(op, "", a.out, Tokens::slice);
    return;
  }
  trace_hidden(op, "", stream(op), Tokens::slice);
  const TensorView branch = slice_of(op, block_gradients(op).mlp_out);
  k.dropout_backward(dropout, stream(op), branch);
  trace_hidden(op, branch_name, branch, Tokens::slice);
}

void GptStage::mlp_weights(const Operation& op) {
  if (at(op.micro_batch).batch.rows == 0) return;
  const BlockParameters::Mlp& p = parameters_of(op.layer).mlps.front();
  const BlockActivations a = block(op);
  const BlockGradients g = block_gradients(op);
  row_parallel_weights(op, Fp8Linear::mlp_c_proj, a.gelu_out, g.mlp_out, gradient(p.projection_weight),
                       gradient(p.projection_bias));
  linear_weights(op, Fp8Linear::c_fc, a.norm2_out, g.fc_out, gradient(p.fc_weight), gradient(p.fc_bias));
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
// out = middle + dropout(c_proj(gelu(c_fc(ln_2(middle))))): c_fc is column-parallel, c_proj row-parallel.
#include "optimized/engine/gpt_stage.h"

namespace tandem {

void GptStage::mlp(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockParameters::Mlp& p = parameters_of(op.layer).mlps.front();
  const BlockActivations a = block(op);
  const std::int64_t width = local_.mlp_width();
  const auto trace_wide = [&](std::string_view what, TensorView values) {
    if (!tracing()) return;
    trace(op, traced_name(op, what), values, Tokens::all, {{local_.tensor_rank * width, (local_.tensor_rank + 1) * width}},
          model_.mlp_width());
  };
  if (recomputing_ && storage_of(op, op.layer).inside) {
    k.gelu_forward(a.fc_out, a.gelu_out);
    return;
  }
  const Narrowed fc_weight = operand(op, Fp8Linear::c_fc, Fp8Operand::w, parameter(p.fc_weight));
  const Narrowed projection_weight = operand(op, Fp8Linear::mlp_c_proj, Fp8Operand::w, parameter(p.projection_weight));
  if (op.phase == Phase::forward) {
    const bool early = local_.tensor_ranks == 1 || context_.pitfalls.on(Pitfall::row_bias_on_every_rank);
    k.linear_gelu_forward(operand(op, Fp8Linear::c_fc, Fp8Operand::x, a.norm2_out).values, fc_weight.values, parameter(p.fc_bias),
                          a.fc_out, a.gelu_out);
    trace_wide("mlp.c_fc", a.fc_out);
    trace_wide("mlp.gelu", a.gelu_out);
    if (recomputing_ && storage_of(op, op.layer).out) return;  // the output was kept
    k.linear_forward(operand(op, Fp8Linear::mlp_c_proj, Fp8Operand::x, a.gelu_out).values, projection_weight.values,
                     early ? parameter(p.projection_bias) : TensorView(),
                     local_.sequence_parallel ? workspace(op).partial : a.out);
    return;
  }
  const BlockGradients g = block_gradients(op);
  k.linear_backward_input(operand(op, Fp8Linear::mlp_c_proj, Fp8Operand::dy, g.mlp_out).values, projection_weight.values,
                          g.fc_out);
  trace_wide("mlp.gelu", g.fc_out);
  k.gelu_backward(g.fc_out, a.fc_out, g.fc_out);
  trace_wide("mlp.c_fc", g.fc_out);
  k.linear_backward_input(operand(op, Fp8Linear::c_fc, Fp8Operand::dy, g.fc_out).values, fc_weight.values, g.norm2_out);
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

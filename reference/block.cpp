// SPDX-License-Identifier: Apache-2.0
#include "reference/block.h"

#include <utility>

#include <fmt/format.h>

namespace tandem::reference {
namespace {

std::string block_prefix(int layer) { return fmt::format("h.{}.", layer); }

/// The linear layer whose parameters are `name`.weight and `name`.bias.
template <class Real>
std::vector<Real> named_linear(const PassContext<Real>& context, const std::string& name, LinearSize size,
                               std::span<const Real> x) {
  std::vector<Real> y(static_cast<std::size_t>(size.rows * size.out));
  rounded_linear_forward<Real>(context.pass.rounding, name, size, x, context.parameter(name + ".weight"),
                               context.parameter(name + ".bias"), y, context.pass.multiply_adds);
  context.trace(name, y);
  return y;
}

/// Returns dx; adds to the gradients of `name`.
template <class Real>
std::vector<Real> named_linear_backward(const PassContext<Real>& context, const std::string& name, LinearSize size,
                                        std::span<const Real> x, std::span<const Real> dy, NamedTensors<Real>& gradients) {
  context.trace("d." + name, dy);
  std::vector<Real> dx(static_cast<std::size_t>(size.rows * size.in));
  rounded_linear_backward<Real>(context.pass.rounding, name, size, x, context.parameter(name + ".weight"), dy, dx,
                                tensor(gradients, name + ".weight"), tensor(gradients, name + ".bias"),
                                context.pass.multiply_adds);
  return dx;
}

template <class Real>
AttentionInput attention_input(const PassContext<Real>& context, int layer) {
  const GptConfig& model = context.model;
  const Rounding& rounding = context.pass.rounding;
  return {.heads = model.heads,
          .hidden = model.hidden,
          .rows = context.placement(),
          .document_starts = context.batch.document_starts,
          .dropout = context.dropout(model.attention_dropout, DropoutSite::attention_probability, layer),
          .probabilities = rounding.probabilities ? rounding.storage : DType::f32};
}

template <class Real>
Dropout residual_dropout(const PassContext<Real>& context, DropoutSite site, int layer) {
  return context.dropout(context.model.residual_dropout, site, layer);
}

template <class Real>
std::vector<Real> dense_mlp_forward(const PassContext<Real>& context, const std::string& name, BlockActivations<Real>& kept) {
  const std::int64_t hidden = context.model.hidden;
  const std::int64_t width = context.model.mlp_width();
  kept.mlp_in = named_linear<Real>(context, name + ".c_fc", {context.tokens(), hidden, width}, kept.norm_2.out);
  kept.mlp_out.resize(kept.mlp_in.size());
  gelu_forward<Real>(kept.mlp_in, kept.mlp_out);
  context.rest(name + ".gelu", kept.mlp_out);
  return named_linear<Real>(context, name + ".c_proj", {context.tokens(), width, hidden}, kept.mlp_out);
}

template <class Real>
std::vector<Real> dense_mlp_backward(const PassContext<Real>& context, const std::string& name,
                                     const BlockActivations<Real>& kept, std::span<const Real> dy,
                                     NamedTensors<Real>& gradients) {
  const std::int64_t hidden = context.model.hidden;
  const std::int64_t width = context.model.mlp_width();
  std::vector<Real> dmlp =
      named_linear_backward<Real>(context, name + ".c_proj", {context.tokens(), width, hidden}, kept.mlp_out, dy, gradients);
  context.trace("d." + name + ".gelu", dmlp);
  gelu_backward<Real>(kept.mlp_in, dmlp, dmlp);
  context.rest(dmlp);
  return named_linear_backward<Real>(context, name + ".c_fc", {context.tokens(), hidden, width}, kept.norm_2.out, dmlp,
                                     gradients);
}

template <class Real>
std::vector<Real> expert_mlp_forward(const PassContext<Real>& context, const std::string& name, BlockActivations<Real>& kept) {
  const ExpertLayer layer = context.expert_layer();
  std::vector<Real> out =
      experts_forward<Real>(layer, context.parameters, name, kept.norm_2.out, kept.experts, context.pass.multiply_adds);
  if (context.pass.routing != nullptr) add_to_record(layer, kept.experts.routing, *context.pass.routing);
  context.trace(name + ".router", kept.experts.routing.logits);
  context.rest(name, out);
  return out;
}

template <class Real>
std::vector<Real> expert_mlp_backward(const PassContext<Real>& context, const std::string& name,
                                      const BlockActivations<Real>& kept, std::span<const Real> dy,
                                      NamedTensors<Real>& gradients) {
  context.trace("d." + name, dy);
  ExpertsGradients<Real> result = experts_backward<Real>(context.expert_layer(), context.parameters, name, kept.norm_2.out,
                                                         kept.experts, dy, gradients, context.pass.multiply_adds);
  context.trace("d." + name + ".router", result.dlogits);
  context.rest(result.dx);
  return std::move(result.dx);
}

}  // namespace

template <class Real>
NormActivations<Real> norm_forward(const PassContext<Real>& context, const std::string& name, std::span<const Real> x) {
  NormActivations<Real> kept{std::vector<Real>(x.size()), std::vector<Real>(context.count(1)),
                             std::vector<Real>(context.count(1))};
  layer_norm_forward<Real>(x, context.parameter(name + ".weight"), context.parameter(name + ".bias"),
                           context.model.layer_norm_epsilon, kept.out, {kept.mean, kept.reciprocal_stddev});
  context.rest(name, kept.out);
  return kept;
}

template <class Real>
std::vector<Real> norm_backward(const PassContext<Real>& context, const std::string& name, std::span<const Real> x,
                                const NormActivations<Real>& kept, std::span<const Real> dy, NamedTensors<Real>& gradients) {
  context.trace("d." + name, dy);
  std::vector<Real> dx(x.size());
  layer_norm_backward<Real>(x, context.parameter(name + ".weight"), {kept.mean, kept.reciprocal_stddev}, dy, dx,
                            tensor(gradients, name + ".weight"), tensor(gradients, name + ".bias"));
  return dx;
}

template <class Real>
void block_attention_forward(const PassContext<Real>& context, int layer, const std::vector<Real>& input,
                             BlockActivations<Real>& kept) {
  const std::string prefix = block_prefix(layer);
  const std::int64_t tokens = context.tokens();
  const std::int64_t hidden = context.model.hidden;

  kept.input = input;
  kept.norm_1 = norm_forward<Real>(context, prefix + "ln_1", kept.input);
  kept.qkv = named_linear<Real>(context, prefix + "attn.c_attn", {tokens, hidden, 3 * hidden}, kept.norm_1.out);
  kept.probabilities.resize(context.count(context.model.heads * context.batch.sequence));
  kept.attention.resize(context.count(hidden));
  attention_forward<Real>(attention_input(context, layer), kept.qkv, kept.attention, kept.probabilities,
                          context.pass.multiply_adds);
  context.rest(prefix + "attn", kept.attention);
  std::vector<Real> branch = named_linear<Real>(context, prefix + "attn.c_proj", {tokens, hidden, hidden}, kept.attention);
  apply_dropout<Real>(residual_dropout(context, DropoutSite::attention_residual, layer), context.placement(), branch, branch);
  kept.middle.resize(input.size());
  add<Real>(kept.input, branch, kept.middle);
  context.rest(prefix + "middle", kept.middle);
  kept.norm_2 = norm_forward<Real>(context, prefix + "ln_2", kept.middle);
}

template <class Real>
std::vector<Real> block_output(const PassContext<Real>& context, int layer, const BlockActivations<Real>& kept,
                               std::vector<Real> branch) {
  apply_dropout<Real>(residual_dropout(context, DropoutSite::mlp_residual, layer), context.placement(), branch, branch);
  add<Real>(kept.middle, branch, branch);
  context.rest(fmt::format("h.{}", layer), branch);
  return branch;
}

template <class Real>
std::vector<Real> block_output_backward(const PassContext<Real>& context, int layer, const std::vector<Real>& dh) {
  context.trace(fmt::format("d.h.{}", layer), dh);
  std::vector<Real> dbranch(dh.size());
  apply_dropout<Real>(residual_dropout(context, DropoutSite::mlp_residual, layer), context.placement(), dh, dbranch);
  context.rest(dbranch);
  return dbranch;
}

template <class Real>
void block_forward(const PassContext<Real>& context, int layer, std::vector<Real>& h, BlockActivations<Real>& kept) {
  block_attention_forward(context, layer, h, kept);
  const std::string mlp = block_prefix(layer) + "mlp";
  h = block_output(context, layer, kept,
                   context.model.experts > 0 ? expert_mlp_forward(context, mlp, kept) : dense_mlp_forward(context, mlp, kept));
}

template <class Real>
void block_attention_backward(const PassContext<Real>& context, int layer, const BlockActivations<Real>& kept,
                              std::span<const Real> dnorm_2, std::vector<Real>& dh, NamedTensors<Real>& gradients) {
  const std::string prefix = block_prefix(layer);
  const std::int64_t tokens = context.tokens();
  const std::int64_t hidden = context.model.hidden;
  add<Real>(dh, norm_backward<Real>(context, prefix + "ln_2", kept.middle, kept.norm_2, dnorm_2, gradients), dh);
  context.rest("d." + prefix + "middle", dh);

  std::vector<Real> dbranch(dh.size());
  apply_dropout<Real>(residual_dropout(context, DropoutSite::attention_residual, layer), context.placement(), dh, dbranch);
  context.rest(dbranch);
  const std::vector<Real> dattention =
      named_linear_backward<Real>(context, prefix + "attn.c_proj", {tokens, hidden, hidden}, kept.attention, dbranch, gradients);
  context.trace("d." + prefix + "attn", dattention);
  std::vector<Real> dqkv(kept.qkv.size());
  attention_backward<Real>(attention_input(context, layer), kept.qkv, kept.probabilities, dattention, dqkv,
                           context.pass.multiply_adds);
  context.rest(dqkv);
  const std::vector<Real> dnorm_1 = named_linear_backward<Real>(context, prefix + "attn.c_attn", {tokens, hidden, 3 * hidden},
                                                                kept.norm_1.out, dqkv, gradients);
  add<Real>(dh, norm_backward<Real>(context, prefix + "ln_1", kept.input, kept.norm_1, dnorm_1, gradients), dh);
  context.rest(dh);
}

template <class Real>
void block_backward(const PassContext<Real>& context, int layer, const BlockActivations<Real>& kept, std::vector<Real>& dh,
                    NamedTensors<Real>& gradients) {
  const std::vector<Real> dmlp = block_output_backward(context, layer, dh);
  const std::string mlp = block_prefix(layer) + "mlp";
  const std::vector<Real> dnorm_2 = context.model.experts > 0 ? expert_mlp_backward<Real>(context, mlp, kept, dmlp, gradients)
                                                              : dense_mlp_backward<Real>(context, mlp, kept, dmlp, gradients);
  block_attention_backward<Real>(context, layer, kept, dnorm_2, dh, gradients);
}

template NormActivations<float> norm_forward(const PassContext<float>&, const std::string&, std::span<const float>);
template NormActivations<double> norm_forward(const PassContext<double>&, const std::string&, std::span<const double>);
template std::vector<float> norm_backward(const PassContext<float>&, const std::string&, std::span<const float>,
                                          const NormActivations<float>&, std::span<const float>, NamedTensors<float>&);
template std::vector<double> norm_backward(const PassContext<double>&, const std::string&, std::span<const double>,
                                           const NormActivations<double>&, std::span<const double>, NamedTensors<double>&);
template void block_attention_forward(const PassContext<float>&, int, const std::vector<float>&, BlockActivations<float>&);
template void block_attention_forward(const PassContext<double>&, int, const std::vector<double>&, BlockActivations<double>&);
template std::vector<float> block_output(const PassContext<float>&, int, const BlockActivations<float>&, std::vector<float>);
template std::vector<double> block_output(const PassContext<double>&, int, const BlockActivations<double>&, std::vector<double>);
template std::vector<float> block_output_backward(const PassContext<float>&, int, const std::vector<float>&);
template std::vector<double> block_output_backward(const PassContext<double>&, int, const std::vector<double>&);
template void block_attention_backward(const PassContext<float>&, int, const BlockActivations<float>&, std::span<const float>,
                                       std::vector<float>&, NamedTensors<float>&);
template void block_attention_backward(const PassContext<double>&, int, const BlockActivations<double>&, std::span<const double>,
                                       std::vector<double>&, NamedTensors<double>&);
template void block_forward(const PassContext<float>&, int, std::vector<float>&, BlockActivations<float>&);
template void block_forward(const PassContext<double>&, int, std::vector<double>&, BlockActivations<double>&);
template void block_backward(const PassContext<float>&, int, const BlockActivations<float>&, std::vector<float>&,
                             NamedTensors<float>&);
template void block_backward(const PassContext<double>&, int, const BlockActivations<double>&, std::vector<double>&,
                             NamedTensors<double>&);

}  // namespace tandem::reference

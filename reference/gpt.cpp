// SPDX-License-Identifier: Apache-2.0
#include "reference/gpt.h"

#include <fmt/format.h>

#include "core/error.h"
#include "reference/block.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

/// Everything that the forward pass leaves for the backward pass.
template <class Real>
struct Activations {
  std::vector<BlockActivations<Real>> blocks;
  std::vector<Real> last;       ///< [tokens, hidden], output of the last block
  NormActivations<Real> final;  ///< ln_f of last
  std::vector<Real> logits;     ///< [tokens, vocabulary]
};

std::string_view head_name(const GptConfig& model) { return model.tied ? "wte.weight" : "lm_head.weight"; }

template <class Real>
void require_batch_fits(const PassContext<Real>& context) {
  const Batch& batch = context.batch;
  TANDEM_CHECK(batch.sequence <= context.model.sequence,
               fmt::format("rows of {} tokens, model.sequence is {}", batch.sequence, context.model.sequence));
  require_size(std::span(batch.ids), context.tokens(), "batch.ids");
  require_size(std::span(batch.targets), context.tokens(), "batch.targets");
  require_size(std::span(batch.positions), context.tokens(), "batch.positions");
  require_size(std::span(batch.document_starts), context.tokens(), "batch.document_starts");
  require_size(std::span(batch.row_ids), batch.rows, "batch.row_ids");
  validate_tokens(batch, context.model.vocabulary);
  require_parameters_of(context.model, context.parameters);
}

template <class Real>
Dropout embedding_dropout(const PassContext<Real>& context) {
  return context.dropout(context.model.embedding_dropout, DropoutSite::embedding, 0);
}

template <class Real>
Activations<Real> forward(const PassContext<Real>& context) {
  const GptConfig& model = context.model;
  const Batch& batch = context.batch;
  require_batch_fits(context);

  std::vector<Real> h(context.count(model.hidden));
  embedding_forward<Real>(context.parameter("wte.weight"), context.parameter("wpe.weight"), batch.ids, batch.positions, h);
  apply_dropout<Real>(embedding_dropout(context), context.placement(), h, h);
  context.trace("embedding", h);

  Activations<Real> kept;
  kept.blocks.resize(static_cast<std::size_t>(model.layers));
  for (int layer = 0; layer < model.layers; ++layer) {
    block_forward(context, layer, h, kept.blocks[static_cast<std::size_t>(layer)]);
  }
  kept.last = std::move(h);
  kept.final = norm_forward<Real>(context, "ln_f", kept.last);
  kept.logits.resize(context.count(model.vocabulary));
  head_forward<Real>({context.tokens(), model.hidden, model.vocabulary}, kept.final.out, context.parameter(head_name(model)),
                     kept.logits, context.pass.multiply_adds);
  context.trace("logits", kept.logits);
  return kept;
}

/// `dlogits` is the gradient that the loss left.
template <class Real>
void backward(const PassContext<Real>& context, const Activations<Real>& kept, std::span<const Real> dlogits,
              NamedTensors<Real>& gradients) {
  const GptConfig& model = context.model;
  context.trace("d.logits", dlogits);
  std::vector<Real> dfinal(context.count(model.hidden));
  head_backward<Real>({context.tokens(), model.hidden, model.vocabulary}, kept.final.out, context.parameter(head_name(model)),
                      dlogits, dfinal, tensor(gradients, head_name(model)), context.pass.multiply_adds);
  std::vector<Real> dh = norm_backward<Real>(context, "ln_f", kept.last, kept.final, dfinal, gradients);
  for (int layer = model.layers - 1; layer >= 0; --layer) {
    block_backward(context, layer, kept.blocks[static_cast<std::size_t>(layer)], dh, gradients);
  }
  context.trace("d.embedding", dh);
  apply_dropout<Real>(embedding_dropout(context), context.placement(), dh, dh);
  embedding_backward<Real>(dh, context.batch.ids, context.batch.positions, tensor(gradients, "wte.weight"),
                           tensor(gradients, "wpe.weight"));
}

template <class Real>
double loss_of_logits(const PassContext<Real>& context, const Activations<Real>& kept, std::vector<Real>& log_sum_exp) {
  const std::int64_t valid_tokens = context.pass.valid_tokens;
  TANDEM_CHECK(context.batch.valid_tokens() <= valid_tokens,
               fmt::format("{} valid tokens in a batch of a step that has {}", context.batch.valid_tokens(), valid_tokens));
  log_sum_exp.resize(context.count(1));
  return cross_entropy_forward<Real>(kept.logits, context.batch.targets, valid_tokens, log_sum_exp);
}

}  // namespace

template <class Real>
double loss_and_gradients(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch,
                          const Pass<Real>& pass, NamedTensors<Real>& gradients) {
  require_parameters_of(model, gradients);
  if (batch.rows == 0) return 0.0;
  const PassContext<Real> context{model, parameters, batch, pass};
  const Activations<Real> kept = forward(context);
  std::vector<Real> log_sum_exp;
  const double loss_share = loss_of_logits(context, kept, log_sum_exp);
  std::vector<Real> dlogits(kept.logits.size());
  cross_entropy_backward<Real>(kept.logits, batch.targets, pass.valid_tokens, log_sum_exp, dlogits);
  backward<Real>(context, kept, dlogits, gradients);
  return loss_share;
}

template <class Real>
double loss(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch, const Pass<Real>& pass) {
  if (batch.rows == 0) return 0.0;
  const PassContext<Real> context{model, parameters, batch, pass};
  std::vector<Real> log_sum_exp;
  return loss_of_logits(context, forward(context), log_sum_exp);
}

template <class Real>
std::vector<Real> logits(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch) {
  if (batch.rows == 0) return {};
  const Pass<Real> pass;
  return forward(PassContext<Real>{model, parameters, batch, pass}).logits;
}

template double loss_and_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&, const Pass<float>&,
                                   NamedTensors<float>&);
template double loss_and_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&, const Pass<double>&,
                                   NamedTensors<double>&);
template double loss(const GptConfig&, const NamedTensors<float>&, const Batch&, const Pass<float>&);
template double loss(const GptConfig&, const NamedTensors<double>&, const Batch&, const Pass<double>&);
template std::vector<float> logits(const GptConfig&, const NamedTensors<float>&, const Batch&);
template std::vector<double> logits(const GptConfig&, const NamedTensors<double>&, const Batch&);

}  // namespace tandem::reference

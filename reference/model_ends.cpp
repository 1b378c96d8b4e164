// SPDX-License-Identifier: Apache-2.0
#include "reference/model_ends.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

template <class Real>
Dropout embedding_dropout(const PassContext<Real>& context) {
  return context.dropout(context.model.embedding_dropout, DropoutSite::embedding, 0);
}

template <class Real>
LinearSize head_size(const PassContext<Real>& context) {
  return {context.tokens(), context.model.hidden, context.model.vocabulary};
}

}  // namespace

template <class Real>
void require_batch_fits(const PassContext<Real>& context) {
  const Batch& batch = context.batch;
  TANDEM_CHECK(batch.sequence <= context.model.sequence,
               fmt::format("rows of {} tokens, model.sequence is {}", batch.sequence, context.model.sequence));
  TANDEM_CHECK(context.pass.global_rows == 0 || batch.rows <= context.pass.global_rows,
               fmt::format("{} rows in a batch of a step that has {}", batch.rows, context.pass.global_rows));
  require_size(std::span(batch.ids), context.tokens(), "batch.ids");
  require_size(std::span(batch.targets), context.tokens(), "batch.targets");
  require_size(std::span(batch.positions), context.tokens(), "batch.positions");
  require_size(std::span(batch.document_starts), context.tokens(), "batch.document_starts");
  require_size(std::span(batch.row_ids), batch.rows, "batch.row_ids");
  validate_tokens(batch, context.model.vocabulary);
  require_parameters_of(context.model, context.parameters);
}

template <class Real>
void require_normaliser_fits(const PassContext<Real>& context) {
  const std::int64_t valid_tokens = context.pass.valid_tokens;
  TANDEM_CHECK(context.batch.valid_tokens() <= valid_tokens,
               fmt::format("{} valid tokens in a batch of a step that has {}", context.batch.valid_tokens(), valid_tokens));
}

template <class Real>
std::vector<Real> embed(const PassContext<Real>& context) {
  std::vector<Real> h(context.count(context.model.hidden));
  embedding_forward<Real>(context.parameter("wte.weight"), context.parameter("wpe.weight"), context.batch.ids,
                          context.batch.positions, h);
  context.rest(h);
  apply_dropout<Real>(embedding_dropout(context), context.placement(), h, h);
  context.rest("embedding", h);
  return h;
}

template <class Real>
void embed_backward(const PassContext<Real>& context, std::span<const Real> dh, NamedTensors<Real>& gradients) {
  context.trace("d.embedding", dh);
  std::vector<Real> dsum(dh.size());
  apply_dropout<Real>(embedding_dropout(context), context.placement(), dh, dsum);
  context.rest(dsum);
  embedding_backward<Real>(dsum, context.batch.ids, context.batch.positions, tensor(gradients, "wte.weight"),
                           tensor(gradients, "wpe.weight"));
}

std::string_view head_name(const GptConfig& model) { return model.tied ? "wte.weight" : "lm_head.weight"; }

template <class Real>
HeadActivations<Real> head(const PassContext<Real>& context, std::vector<Real> last) {
  HeadActivations<Real> kept;
  kept.last = std::move(last);
  kept.final = norm_forward<Real>(context, "ln_f", kept.last);
  kept.logits.resize(context.count(context.model.vocabulary));
  head_forward<Real>(head_size(context), context.operand(kept.final.out),
                     context.operand(context.parameter(head_name(context.model))), kept.logits, context.pass.multiply_adds);
  context.rest("logits", kept.logits);
  return kept;
}

template <class Real>
double head_loss(const PassContext<Real>& context, HeadActivations<Real>& kept) {
  require_normaliser_fits(context);
  kept.log_sum_exp.resize(context.count(1));
  return cross_entropy_forward<Real>(kept.logits, context.batch.targets, context.pass.valid_tokens, kept.log_sum_exp);
}

template <class Real>
std::vector<Real> head_loss_backward(const PassContext<Real>& context, const HeadActivations<Real>& kept,
                                     NamedTensors<Real>& gradients) {
  std::vector<Real> dlogits(kept.logits.size());
  cross_entropy_backward<Real>(kept.logits, context.batch.targets, context.pass.valid_tokens, kept.log_sum_exp, dlogits,
                               context.pass.loss_scale);
  context.rest("d.logits", dlogits);
  const std::string_view name = head_name(context.model);
  std::vector<Real> dfinal(context.count(context.model.hidden));
  head_backward<Real>(head_size(context), context.operand(kept.final.out), context.operand(context.parameter(name)),
                      context.operand(dlogits), dfinal, tensor(gradients, name), context.pass.multiply_adds);
  context.rest(dfinal);
  std::vector<Real> dlast = norm_backward<Real>(context, "ln_f", kept.last, kept.final, dfinal, gradients);
  context.rest(dlast);
  return dlast;
}

template void require_batch_fits(const PassContext<float>&);
template void require_batch_fits(const PassContext<double>&);
template void require_normaliser_fits(const PassContext<float>&);
template void require_normaliser_fits(const PassContext<double>&);
template std::vector<float> embed(const PassContext<float>&);
template std::vector<double> embed(const PassContext<double>&);
template void embed_backward(const PassContext<float>&, std::span<const float>, NamedTensors<float>&);
template void embed_backward(const PassContext<double>&, std::span<const double>, NamedTensors<double>&);
template HeadActivations<float> head(const PassContext<float>&, std::vector<float>);
template HeadActivations<double> head(const PassContext<double>&, std::vector<double>);
template double head_loss(const PassContext<float>&, HeadActivations<float>&);
template double head_loss(const PassContext<double>&, HeadActivations<double>&);
template std::vector<float> head_loss_backward(const PassContext<float>&, const HeadActivations<float>&, NamedTensors<float>&);
template std::vector<double> head_loss_backward(const PassContext<double>&, const HeadActivations<double>&,
                                                NamedTensors<double>&);

}  // namespace tandem::reference

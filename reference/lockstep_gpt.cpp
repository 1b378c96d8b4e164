// SPDX-License-Identifier: Apache-2.0
#include "reference/lockstep_gpt.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {

template <class Real>
LockstepGpt<Real>::LockstepGpt(const GptConfig& model, const Pass<Real>& pass, std::vector<LockstepRank<Real>> ranks,
                               std::vector<std::vector<std::int64_t>> own_places)
    : model_(model),
      pass_(pass),
      ranks_(std::move(ranks)),
      own_places_(std::move(own_places)),
      blocks_(static_cast<std::size_t>(model.layers)) {
  TANDEM_CHECK(model.experts == 0, "this definition is of a dense model");
  TANDEM_CHECK(!ranks_.empty() && ranks_.size() == own_places_.size(), fmt::format("{} ranks", ranks_.size()));
}

template <class Real>
Dropout LockstepGpt<Real>::dropout(double probability, DropoutSite site, int layer) const {
  if (!pass_.dropout) return {};
  return {probability, {pass_.dropout->seed, pass_.dropout->step, static_cast<std::uint32_t>(layer), site}};
}

template <class Real>
PerRank<Real> LockstepGpt<Real>::masked(const Dropout& dropout, const PerRank<Real>& x) const {
  PerRank<Real> y = x;
  for (std::size_t r = 0; r < x.size(); ++r) apply_dropout_at<Real>(dropout, own_places_[r], x[r], y[r]);
  return y;
}

template <class Real>
void LockstepGpt<Real>::block_forward(int layer, PerRank<Real>& h) {
  const std::string prefix = fmt::format("h.{}.", layer);
  Block& kept = blocks_[static_cast<std::size_t>(layer)];

  kept.input = h;
  kept.norm_1 = norm_forward(ranks_, prefix + "ln_1", model_.layer_norm_epsilon, kept.input);
  kept.entered_1 = enter(kept.norm_1.out, Part::layers);
  kept.qkv = column_linear_forward(ranks_, prefix + "attn.c_attn", kept.entered_1);
  kept.attention = attention_forward(layer, kept.qkv);
  PerRank<Real> branch = leave(row_linear_forward(ranks_, prefix + "attn.c_proj", kept.attention), Part::layers);
  bias_forward(ranks_, prefix + "attn.c_proj", branch);
  kept.middle = add_ranks(kept.input, masked(dropout(model_.residual_dropout, DropoutSite::attention_residual, layer), branch));

  kept.norm_2 = norm_forward(ranks_, prefix + "ln_2", model_.layer_norm_epsilon, kept.middle);
  kept.entered_2 = enter(kept.norm_2.out, Part::layers);
  kept.mlp_in = column_linear_forward(ranks_, prefix + "mlp.c_fc", kept.entered_2);
  kept.mlp_out = kept.mlp_in;
  for (std::size_t r = 0; r < ranks_.size(); ++r) gelu_forward<Real>(kept.mlp_in[r], kept.mlp_out[r]);
  branch = leave(row_linear_forward(ranks_, prefix + "mlp.c_proj", kept.mlp_out), Part::layers);
  bias_forward(ranks_, prefix + "mlp.c_proj", branch);
  h = add_ranks(kept.middle, masked(dropout(model_.residual_dropout, DropoutSite::mlp_residual, layer), branch));
}

template <class Real>
void LockstepGpt<Real>::block_backward(int layer, PerRank<Real>& dh) {
  const std::string prefix = fmt::format("h.{}.", layer);
  const Block& kept = blocks_[static_cast<std::size_t>(layer)];

  PerRank<Real> dbranch = masked(dropout(model_.residual_dropout, DropoutSite::mlp_residual, layer), dh);
  bias_backward(ranks_, prefix + "mlp.c_proj", dbranch);
  PerRank<Real> dmlp = row_linear_backward(ranks_, prefix + "mlp.c_proj", kept.mlp_out, enter(dbranch, Part::layers));
  for (std::size_t r = 0; r < ranks_.size(); ++r) gelu_backward<Real>(kept.mlp_in[r], dmlp[r], dmlp[r]);
  const PerRank<Real> dnorm_2 = leave(column_linear_backward(ranks_, prefix + "mlp.c_fc", kept.entered_2, dmlp), Part::layers);
  dh = add_ranks(dh, norm_backward(ranks_, prefix + "ln_2", kept.middle, kept.norm_2, dnorm_2));

  dbranch = masked(dropout(model_.residual_dropout, DropoutSite::attention_residual, layer), dh);
  bias_backward(ranks_, prefix + "attn.c_proj", dbranch);
  const PerRank<Real> dattention =
      row_linear_backward(ranks_, prefix + "attn.c_proj", kept.attention, enter(dbranch, Part::layers));
  const PerRank<Real> dqkv = attention_backward(layer, kept.qkv, dattention);
  const PerRank<Real> dnorm_1 = leave(column_linear_backward(ranks_, prefix + "attn.c_attn", kept.entered_1, dqkv), Part::layers);
  dh = add_ranks(dh, norm_backward(ranks_, prefix + "ln_1", kept.input, kept.norm_1, dnorm_1));
}

template <class Real>
std::vector<double> LockstepGpt<Real>::forward_and_backward() {
  const Dropout embedding_mask = dropout(model_.embedding_dropout, DropoutSite::embedding, 0);
  PerRank<Real> h = masked(embedding_mask, embedding_forward());
  for (int layer = 0; layer < model_.layers; ++layer) block_forward(layer, h);
  const NormOfRanks<Real> last = norm_forward(ranks_, "ln_f", model_.layer_norm_epsilon, h);

  PerRank<Real> dlast;
  std::vector<double> losses = head_forward_and_backward(last.out, dlast);

  PerRank<Real> dh = norm_backward(ranks_, "ln_f", h, last, dlast);
  for (int layer = model_.layers - 1; layer >= 0; --layer) block_backward(layer, dh);
  embedding_backward(masked(embedding_mask, dh));
  return losses;
}

template class LockstepGpt<float>;
template class LockstepGpt<double>;

}  // namespace tandem::reference

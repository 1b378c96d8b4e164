// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "reference/block.h"

/// What a model does before its first block and after its last one.
namespace tandem::reference {

/// Throws unless the parameters are the model's and the batch can pass through it: InputError for tokens outside the vocabulary,
/// ContractError for everything else.
template <class Real>
void require_batch_fits(const PassContext<Real>& context);
/// Throws ContractError where the batch has more valid tokens than pass.valid_tokens, which counts those of the whole step.
template <class Real>
void require_normaliser_fits(const PassContext<Real>& context);

/// dropout(wte[ids] + wpe[positions]), [tokens, hidden].
template <class Real>
[[nodiscard]] std::vector<Real> embed(const PassContext<Real>& context);
/// `dh` is the gradient of what embed() returned. Adds to the gradients of wte and wpe.
template <class Real>
void embed_backward(const PassContext<Real>& context, std::span<const Real> dh, NamedTensors<Real>& gradients);

/// "wte.weight" where tied, else "lm_head.weight".
[[nodiscard]] std::string_view head_name(const GptConfig& model);

/// What the final norm and the head leave for the backward pass.
template <class Real>
struct HeadActivations {
  std::vector<Real> last;         ///< [tokens, hidden], output of the last block
  NormActivations<Real> final;    ///< ln_f of last
  std::vector<Real> logits;       ///< [tokens, vocabulary]
  std::vector<Real> log_sum_exp;  ///< [tokens], set by head_loss()
};

/// logits = ln_f(last) head^T.
template <class Real>
[[nodiscard]] HeadActivations<Real> head(const PassContext<Real>& context, std::vector<Real> last);
/// This batch's share of the loss.
template <class Real>
[[nodiscard]] double head_loss(const PassContext<Real>& context, HeadActivations<Real>& kept);
/// After head_loss(). Returns the gradient of `last`; adds to those of ln_f and the head.
template <class Real>
[[nodiscard]] std::vector<Real> head_loss_backward(const PassContext<Real>& context, const HeadActivations<Real>& kept,
                                                   NamedTensors<Real>& gradients);

}  // namespace tandem::reference

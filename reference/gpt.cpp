// SPDX-License-Identifier: Apache-2.0
#include "reference/gpt.h"

#include <utility>

#include "reference/model_ends.h"

namespace tandem::reference {
namespace {

/// Everything that the forward pass leaves for the backward pass.
template <class Real>
struct Activations {
  std::vector<BlockActivations<Real>> blocks;
  HeadActivations<Real> head;
};

template <class Real>
Activations<Real> forward(const PassContext<Real>& context) {
  require_batch_fits(context);
  std::vector<Real> h = embed(context);
  Activations<Real> kept;
  kept.blocks.resize(static_cast<std::size_t>(context.model.layers));
  for (int layer = 0; layer < context.model.layers; ++layer) {
    block_forward(context, layer, h, kept.blocks[static_cast<std::size_t>(layer)]);
  }
  kept.head = head(context, std::move(h));
  return kept;
}

template <class Real>
void backward(const PassContext<Real>& context, const Activations<Real>& kept, NamedTensors<Real>& gradients) {
  std::vector<Real> dh = head_loss_backward(context, kept.head, gradients);
  for (int layer = context.model.layers - 1; layer >= 0; --layer) {
    block_backward(context, layer, kept.blocks[static_cast<std::size_t>(layer)], dh, gradients);
  }
  embed_backward<Real>(context, dh, gradients);
}

}  // namespace

template <class Real>
double loss_and_gradients(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch,
                          const Pass<Real>& pass, NamedTensors<Real>& gradients) {
  require_parameters_of(model, gradients);
  if (batch.rows == 0) return 0.0;
  const PassContext<Real> context{model, parameters, batch, pass};
  Activations<Real> kept = forward(context);
  const double loss_share = head_loss(context, kept.head);
  backward(context, kept, gradients);
  return loss_share;
}

template <class Real>
double loss(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch, const Pass<Real>& pass) {
  if (batch.rows == 0) return 0.0;
  const PassContext<Real> context{model, parameters, batch, pass};
  Activations<Real> kept = forward(context);
  return head_loss(context, kept.head);
}

template <class Real>
std::vector<Real> logits(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch) {
  if (batch.rows == 0) return {};
  const Pass<Real> pass;
  return forward(PassContext<Real>{model, parameters, batch, pass}).head.logits;
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

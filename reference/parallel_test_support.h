// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

#include "reference/gpt.h"
#include "reference/test_support.h"

/// What the tests of parallel techniques share. Nothing else includes it.
namespace tandem::reference {

/// Twelve heads, so that 1, 2, 3 and 4 ranks divide them; a vocabulary that only 1 divides; every kind of dropout.
inline GptConfig parallel_test_model(bool tied = true) {
  GptConfig model{.vocabulary = 13, .sequence = 11, .layers = 2, .hidden = 24, .heads = 12, .mlp_hidden = 36, .tied = tied};
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1;
  return model;
}

/// Rows with very different numbers of valid tokens, one with none, each of three documents; 9 of the model's 11 positions. They
/// are not the first rows of their global batch, so that masks by local row are other masks.
inline Batch parallel_test_batch(const GptConfig& model) {
  Batch batch = ragged_batch(model, 9, {9, 1, 0, 4}, 6);
  pack_documents(batch, {2, 6});
  batch.row_ids = {3, 7, 1, 4};
  return batch;
}

template <class Real>
Pass<Real> parallel_test_pass(const Batch& batch) {
  Pass<Real> pass;
  pass.valid_tokens = batch.valid_tokens();
  pass.dropout = DropoutStep{17, 2};
  return pass;
}

struct OneDeviceStep {
  double loss = 0.0;
  NamedTensors<double> gradients;
};

inline OneDeviceStep one_device_step(const GptConfig& model, const NamedTensors<double>& parameters, const Batch& batch,
                                     const Pass<double>& pass) {
  OneDeviceStep step{0.0, zero_tensors<double>(model)};
  step.loss = loss_and_gradients(model, parameters, batch, pass, step.gradients);
  return step;
}

}  // namespace tandem::reference

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/model_config.h"
#include "core/rng.h"
#include "reference/tensors.h"

namespace tandem::reference {

struct GenerationConfig {
  std::int64_t tokens = 1;   ///< how many to append
  double temperature = 0.0;  ///< 0: always the likeliest
  std::uint64_t seed = 1;
};

/// The next token. Temperature 0: the one of the largest logit, the smallest id among equals. Otherwise one of
/// softmax(logits / temperature): with u = rng.next_unit(), the first id whose cumulated probability exceeds u. Probabilities are
/// computed in double and cumulated in the order of the ids.
template <class Real>
[[nodiscard]] std::int32_t sample_token(std::span<const Real> logits, double temperature, CounterRng& rng);

/// The tokens that follow `prompt`, without the prompt. Every token comes from a whole forward pass over the last
/// min(length, model.sequence) tokens at positions 0, 1, ...; draws are from CounterRng(seed, "generate"), one a token where the
/// temperature is not 0. Throws InputError for an empty prompt and for tokens outside the vocabulary.
template <class Real>
[[nodiscard]] std::vector<std::int32_t> generate(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                 std::span<const std::int32_t> prompt, const GenerationConfig& config);

}  // namespace tandem::reference

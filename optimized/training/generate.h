// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/model_config.h"
#include "core/rng.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/rank_context.h"

namespace tandem {

struct GenerateOptions {
  std::int64_t tokens = 64;  ///< how many to append
  double temperature = 0.8;  ///< 0: always the likeliest
  std::uint64_t seed = 1;
  std::function<void(std::int32_t token)> on_token = {};  ///< called as each one is known
  /// Called for each token that the model reads, of the prompt and of the text: it, and the logits of the one that follows.
  std::function<void(std::int32_t token, const std::vector<double>& logits)> on_logits = {};
  const std::atomic<bool>* stop = nullptr;  ///< ends the text after the token under way
};

/// The tokens that follow `prompt`, with a key-value cache: a token costs one pass over the model, not one over the whole text.
/// Context is the last min(length, model.sequence) tokens, at positions 0, 1, ...; once the text is longer than the model's
/// sequence, the window moves by one with each token and the cache is filled anew. One draw of CounterRng(seed, "generate") per
/// token unless the temperature is 0. Throws InputError for an empty prompt and for tokens outside the vocabulary.
[[nodiscard]] std::vector<std::int32_t> generate(const RankContext& context, const GptConfig& model, const ParameterStore& store,
                                                 std::span<const std::int32_t> prompt, const GenerateOptions& options);

}  // namespace tandem

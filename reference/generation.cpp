// SPDX-License-Identifier: Apache-2.0
#include "reference/generation.h"

#include <algorithm>
#include <cmath>

#include "core/batch.h"
#include "core/error.h"
#include "reference/gpt.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

/// Logits of the token that follows `context`.
template <class Real>
std::vector<Real> next_logits(const GptConfig& model, const NamedTensors<Real>& parameters,
                              std::span<const std::int32_t> context) {
  const auto length = static_cast<std::int64_t>(context.size());
  const std::int64_t window = std::min(length, model.sequence);
  Batch batch = make_batch(1, window);
  std::copy(context.end() - window, context.end(), batch.ids.begin());
  const std::vector<Real> all = logits(model, parameters, batch);
  return {all.end() - model.vocabulary, all.end()};
}

}  // namespace

template <class Real>
std::int32_t sample_token(std::span<const Real> logits, double temperature, CounterRng& rng) {
  TANDEM_CHECK(!logits.empty(), "no logits");
  TANDEM_CHECK(temperature >= 0.0, fmt::format("temperature {}", temperature));
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  if (temperature == 0.0) return static_cast<std::int32_t>(likeliest - logits.begin());

  std::vector<double> weights;
  double sum = 0.0;
  for (const Real logit : logits) {
    weights.push_back(std::exp((static_cast<double>(logit) - static_cast<double>(*likeliest)) / temperature));
    sum += weights.back();
  }
  const double u = rng.next_unit();
  double cumulated = 0.0;
  for (std::size_t id = 0; id < weights.size(); ++id) {
    cumulated += weights[id] / sum;
    if (cumulated > u) return static_cast<std::int32_t>(id);
  }
  // Rounding left the total just below u: the last id that has any probability.
  const auto last = std::find_if(weights.rbegin(), weights.rend(), [](double weight) { return weight > 0.0; });
  return static_cast<std::int32_t>(weights.rend() - last) - 1;
}

template <class Real>
std::vector<std::int32_t> generate(const GptConfig& model, const NamedTensors<Real>& parameters,
                                   std::span<const std::int32_t> prompt, const GenerationConfig& config) {
  if (prompt.empty()) throw InputError("the prompt is empty; give at least one token");
  Batch whole_prompt = make_batch(1, static_cast<std::int64_t>(prompt.size()));
  std::copy(prompt.begin(), prompt.end(), whole_prompt.ids.begin());
  validate_tokens(whole_prompt, model.vocabulary);

  std::vector<std::int32_t> context(prompt.begin(), prompt.end());
  CounterRng rng(config.seed, "generate");
  for (std::int64_t i = 0; i < config.tokens; ++i) {
    const std::vector<Real> scores = next_logits(model, parameters, context);
    context.push_back(sample_token<Real>(scores, config.temperature, rng));
  }
  return {context.begin() + static_cast<std::ptrdiff_t>(prompt.size()), context.end()};
}

template std::int32_t sample_token(std::span<const float>, double, CounterRng&);
template std::int32_t sample_token(std::span<const double>, double, CounterRng&);
template std::vector<std::int32_t> generate(const GptConfig&, const NamedTensors<float>&, std::span<const std::int32_t>,
                                            const GenerationConfig&);
template std::vector<std::int32_t> generate(const GptConfig&, const NamedTensors<double>&, std::span<const std::int32_t>,
                                            const GenerationConfig&);

}  // namespace tandem::reference

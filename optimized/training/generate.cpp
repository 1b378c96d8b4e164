// SPDX-License-Identifier: Apache-2.0
#include "optimized/training/generate.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

namespace tandem {
namespace {

// One sequence being decoded token by token.
class Decoder {
 public:
  Decoder(const RankContext& context, const GptConfig& model, const ParameterStore& store)
      : kernels_(*context.kernels), model_(model), store_(store), dtype_(store.storage()) {
    const auto hold = [&](std::initializer_list<std::int64_t> shape) {
      buffers_.push_back(context.arena->allocate(dtype_, Shape(shape), MemoryCategory::workspace));
      return buffers_.back().view(dtype_, Shape(shape));
    };
    stream_ = hold({1, model.hidden});
    normed_ = hold({1, model.hidden});
    branch_ = hold({1, model.hidden});
    qkv_ = hold({1, 3 * model.hidden});
    wide_pre_ = hold({1, model.mlp_width()});
    wide_ = hold({1, model.mlp_width()});
    mean_ = hold({1});
    rstd_ = hold({1});
    logits_ = hold({1, model.vocabulary});
    for (int layer = 0; layer < model.layers; ++layer) {
      keys_.push_back(hold({1, model.sequence, model.hidden}));
      values_.push_back(hold({1, model.sequence, model.hidden}));
    }
  }

  void forget() noexcept { length_ = 0; }
  [[nodiscard]] std::int64_t length() const noexcept { return length_; }

  // Takes one more token of the sequence; afterwards logits() are those of the token that follows it.
  void advance(std::int32_t token) {
    const std::int32_t ids[] = {token};
    const std::int32_t positions[] = {static_cast<std::int32_t>(length_)};
    kernels_.embedding_forward(ids, positions, named("wte.weight"), named("wpe.weight"), stream_);
    for (int layer = 0; layer < model_.layers; ++layer) block(layer);
    norm("ln_f");
    kernels_.head_forward(normed_, named(model_.tied ? "wte.weight" : "lm_head.weight"), logits_);
    ++length_;
  }

  [[nodiscard]] std::vector<double> logits() const { return ParameterStore::values_of(kernels_.memory(), logits_); }

 private:
  [[nodiscard]] TensorView named(const std::string& name) const { return store_.parameter(store_.index_of(name)); }

  void norm(const std::string& name) {
    kernels_.layer_norm_forward(stream_, named(name + ".weight"), named(name + ".bias"), model_.layer_norm_epsilon, normed_,
                                mean_, rstd_);
  }

  void linear(TensorView x, const std::string& name, TensorView y) {
    kernels_.linear_forward(x, named(name + ".weight"), named(name + ".bias"), y);
  }

  void block(int layer) {
    const std::string prefix = fmt::format("h.{}.", layer);
    const auto index = static_cast<std::size_t>(layer);
    norm(prefix + "ln_1");
    linear(normed_, prefix + "attn.c_attn", qkv_);
    kernels_.attention_decode(model_.heads, model_.head_size(), length_, qkv_, keys_[index], values_[index], normed_);
    linear(normed_, prefix + "attn.c_proj", branch_);
    kernels_.add(branch_, stream_);
    norm(prefix + "ln_2");
    kernels_.linear_gelu_forward(normed_, named(prefix + "mlp.c_fc.weight"), named(prefix + "mlp.c_fc.bias"), wide_pre_, wide_);
    linear(wide_, prefix + "mlp.c_proj", branch_);
    kernels_.add(branch_, stream_);
  }

  Kernels& kernels_;
  const GptConfig& model_;
  const ParameterStore& store_;
  DType dtype_;
  std::vector<Arena::Buffer> buffers_;
  TensorView stream_, normed_, branch_, qkv_, wide_pre_, wide_, mean_, rstd_, logits_;
  std::vector<TensorView> keys_, values_;
  std::int64_t length_ = 0;
};

std::int32_t choose(const std::vector<double>& logits, double temperature, CounterRng& rng) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (temperature == 0.0) return static_cast<std::int32_t>(best - logits.begin());
  std::vector<double> weights(logits.size());
  double total = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) total += weights[i] = std::exp((logits[i] - *best) / temperature);
  const double target = rng.next_unit() * total;
  double cumulated = 0;
  std::int32_t last_possible = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    cumulated += weights[i];
    if (weights[i] > 0) last_possible = static_cast<std::int32_t>(i);
    if (cumulated > target) return last_possible;
  }
  return last_possible;
}

}  // namespace

std::vector<std::int32_t> generate(const RankContext& context, const GptConfig& model, const ParameterStore& store,
                                   std::span<const std::int32_t> prompt, const GenerateOptions& options) {
  if (prompt.empty()) throw InputError("the prompt is empty; give at least one character");
  for (const std::int32_t token : prompt) {
    if (token < 0 || token >= model.vocabulary) {
      throw InputError(fmt::format("the prompt has token {}, which is outside the vocabulary of {}", token, model.vocabulary));
    }
  }
  Decoder decoder(context, model, store);
  CounterRng rng(options.seed, "generate");
  std::vector<std::int32_t> text(prompt.begin(), prompt.end());
  std::size_t next = text.size() - std::min(text.size(), static_cast<std::size_t>(model.sequence));
  while (text.size() < prompt.size() + static_cast<std::size_t>(options.tokens)) {
    if (decoder.length() == model.sequence) {  // positions shift for every token of the window
      decoder.forget();
      next = text.size() - static_cast<std::size_t>(model.sequence);
    }
    for (; next < text.size(); ++next) {
      decoder.advance(text[next]);
      if (options.on_logits) options.on_logits(text[next], decoder.logits());
    }
    text.push_back(choose(decoder.logits(), options.temperature, rng));
    if (options.on_token) options.on_token(text.back());
    if (options.stop != nullptr && *options.stop) break;
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

}  // namespace tandem

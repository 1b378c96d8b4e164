// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace tandem {

/// A GPT-2 style decoder: pre-LN blocks, learned positions, tanh-GELU, biases everywhere.
struct GptConfig {
  std::int64_t vocabulary = 256;
  std::int64_t sequence = 64;  ///< longest context; rows of `wpe.weight`
  int layers = 2;
  std::int64_t hidden = 64;
  int heads = 4;
  std::int64_t mlp_hidden = 0;  ///< 0 means 4 * hidden
  bool tied = true;             ///< the head is `wte`; otherwise `lm_head.weight` [vocabulary, hidden]
  /// Experts of each block's MLP (docs/techniques/expert_parallel.md); 0: one dense MLP.
  int experts = 0;
  int expert_choices = 1;               ///< experts of a token: 1 or 2
  double capacity_factor = 1.25;        ///< see expert_capacity()
  double auxiliary_loss_weight = 0.01;  ///< of the load-balancing loss
  double layer_norm_epsilon = 1e-5;
  double embedding_dropout = 0.0;
  double attention_dropout = 0.0;
  double residual_dropout = 0.0;

  [[nodiscard]] std::int64_t mlp_width() const noexcept { return mlp_hidden > 0 ? mlp_hidden : 4 * hidden; }
  [[nodiscard]] std::int64_t head_size() const noexcept { return hidden / heads; }
  /// Tokens of one row that one expert takes: ceil(capacity_factor * expert_choices * row_tokens / experts), at least 1 and at
  /// most row_tokens. Capacity is counted per row, so that what is dropped does not depend on how rows are dealt to ranks.
  [[nodiscard]] std::int64_t expert_capacity(std::int64_t row_tokens) const;
  [[nodiscard]] bool has_dropout() const noexcept {
    return embedding_dropout > 0 || attention_dropout > 0 || residual_dropout > 0;
  }
  friend bool operator==(const GptConfig&, const GptConfig&) = default;
};

/// Throws InputError, naming the field, where a size is not positive, heads do not divide hidden or a dropout is not in [0, 1).
void validate(const GptConfig& model);

enum class ParameterKind { token_embedding, position_embedding, matrix, bias, norm_weight, norm_bias, router };

/// One parameter tensor. Names, layouts and order are those of Hugging Face GPT-2; matrices are [in, out] (y = x W + b).
struct ParameterSpec {
  std::string name;  ///< "wte.weight", "h.3.attn.c_attn.weight", "ln_f.bias", ...
  Shape shape;
  ParameterKind kind;
  int layer;                 ///< -1 for embeddings, final norm and head
  bool residual_projection;  ///< c_proj of attention and MLP: initialised smaller, by 1 / sqrt(2 layers)
  int expert = -1;           ///< the expert that it belongs to; -1: none
  /// Weight decay applies to tensors of two and more dimensions (so to wte and wpe; not to biases and norms).
  [[nodiscard]] bool decays() const noexcept { return shape.size() >= 2; }
  [[nodiscard]] std::int64_t num_elements() const { return tandem::num_elements(shape); }
};

/// All parameters in definition order: wte, wpe, h.0.ln_1.weight, h.0.ln_1.bias, h.0.attn.c_attn.weight, ..., ln_f.bias, and
/// lm_head.weight when not tied. Backward order is the reverse. With experts, h.N.mlp holds `router.weight` [hidden, experts]
/// (no bias) and for each expert E `experts.E.c_fc.weight`, `.c_fc.bias`, `.c_proj.weight`, `.c_proj.bias` as of a dense MLP.
[[nodiscard]] std::vector<ParameterSpec> gpt_parameters(const GptConfig& model);
[[nodiscard]] std::int64_t num_parameters(const GptConfig& model);

/// How parameters start.
///   gpt2       N(0, 0.02^2), residual projections N(0, (0.02 / sqrt(2 layers))^2), biases 0, norm weights 1
///              (router weights N(0, 1 / hidden))
///   scattered  the same matrices, biases N(0, 0.02^2), norm weights 1 + N(0, 0.1^2): for checks, since zero biases and unit
///              weights hide faults
enum class Initialization { gpt2, scattered };

/// Value of one element, a function of (seed, name, global element index) alone. Rounded to float so that all precisions start
/// from the same number.
[[nodiscard]] double initial_value(const GptConfig& model, const ParameterSpec& parameter, Initialization how, std::uint64_t seed,
                                   std::int64_t element_index);

}  // namespace tandem

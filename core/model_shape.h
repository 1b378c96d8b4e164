// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/model_config.h"

namespace tandem {

/// The sizes of a decoder, of the GPT and the Llama kind: all that its cost depends on. The engine trains those that are a
/// GptConfig; the rest can be planned and simulated.
struct ModelShape {
  std::string name;
  std::int64_t layers = 1, hidden = 1, heads = 1;
  std::int64_t kv_heads = 0;    ///< grouped-query attention; 0: heads
  std::int64_t mlp_hidden = 0;  ///< 0: 4 hidden
  bool gated = false;           ///< three matrices in the MLP (SwiGLU), not two
  bool biases = true;
  bool learned_positions = true;  ///< a table of `sequence` rows; otherwise rotary or ALiBi, without parameters
  bool rms_norm = false;          ///< norms without a bias
  bool tied = true;               ///< the head is the token table
  std::int64_t vocabulary = 51200;
  std::int64_t sequence = 2048;  ///< tokens of a row when nothing else is said
  int experts = 0, expert_choices = 1;

  [[nodiscard]] std::int64_t key_value_heads() const noexcept { return kv_heads > 0 ? kv_heads : heads; }
  [[nodiscard]] std::int64_t mlp_width() const noexcept { return mlp_hidden > 0 ? mlp_hidden : 4 * hidden; }
  [[nodiscard]] std::int64_t head_size() const noexcept { return hidden / heads; }
  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

/// How attention's work is counted: the masked half of causal attention as work (most published figures), or not.
enum class AttentionFlops : std::uint8_t { full, causal };

[[nodiscard]] double parameters_of_layer(const ModelShape& model);
[[nodiscard]] double num_parameters(const ModelShape& model);
/// Forward FLOPs of one row of `sequence` tokens, a multiply-add counting 2: per token 2 x the elements of each matrix (head
/// included, token table not), and per layer 4 s h (full) or 2 s h (causal) of attention. Training: three times that.
[[nodiscard]] double forward_flops_per_row(const ModelShape& model, std::int64_t sequence, AttentionFlops attention);

[[nodiscard]] ModelShape shape_of(const GptConfig& model, std::string name = {});
/// What the engine trains, where the shape is one: a GPT without grouped queries, gates, rotary positions or RMS norms.
[[nodiscard]] std::optional<GptConfig> gpt_config_of(const ModelShape& shape);
/// A model of the same kind that trains on a desk: fewer and narrower layers, same ratios and divisibility by `degrees`.
[[nodiscard]] GptConfig small_twin(const ModelShape& shape, int tensor, int stages);

/// {"model": {...}} as for training, or {"shape": {...}}. A file, or the name of one of results/models/*.json, which travel
/// inside the program. Throws InputError naming file and field.
[[nodiscard]] ModelShape read_model_shape(const std::string& path_or_name);
[[nodiscard]] ModelShape model_shape_from_json(std::string_view text, std::string_view source_name);
[[nodiscard]] std::vector<std::string> shipped_models();

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "core/model_shape.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/config.h"
#include "core/error.h"
#include "core/io/json_field.h"
#include "core/nearest_name.h"
#include "core/shipped_files.h"

namespace tandem {
namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

double key_value_width(const ModelShape& model) { return real(model.key_value_heads() * model.head_size()); }

double matrices_of_attention(const ModelShape& model) {
  const double h = real(model.hidden);
  return 2 * h * h + 2 * h * key_value_width(model);
}

double matrices_of_mlp(const ModelShape& model) {
  return (model.gated ? 3.0 : 2.0) * real(model.hidden) * real(model.mlp_width());
}

double norm_width(const ModelShape& model) { return (model.rms_norm ? 1.0 : 2.0) * real(model.hidden); }

const std::vector<std::string>& shape_keys() {
  static const std::vector<std::string> keys = {
      "name",     "layers", "hidden",     "heads",    "kv_heads", "mlp_hidden",    "gated", "biases", "learned_positions",
      "rms_norm", "tied",   "vocabulary", "sequence", "experts",  "expert_choices"};
  return keys;
}

constexpr std::int64_t kWidest = 10'000'000, kMostTokens = 100'000'000, kDeepest = 100'000;

void read_size(const JsonField& shape, const char* key, std::int64_t least, std::int64_t& value, std::int64_t most = kWidest) {
  if (!shape.has(key)) return;
  value = shape[key].count();
  shape[key].require(value >= least, fmt::format("is {}, it must be at least {}", value, least));
  shape[key].require(value <= most, fmt::format("is {}, it must be at most {}", value, most));
}

void read_small(const JsonField& shape, const char* key, std::int64_t least, int& value) {
  std::int64_t wide = value;
  read_size(shape, key, least, wide);
  value = static_cast<int>(wide);
}

void read_flag(const JsonField& shape, const char* key, bool& value) {
  if (!shape.has(key)) return;
  shape[key].require(shape[key].value().is_boolean(), "is neither true nor false");
  value = shape[key].value().get<bool>();
}

ModelShape shape_from(const JsonField& shape) {
  shape.require(shape.value().is_object(), "is no object");
  for (const auto& [key, value] : shape.value().items()) {
    if (std::find(shape_keys().begin(), shape_keys().end(), key) != shape_keys().end()) continue;
    const auto nearest = nearest_name(key, shape_keys());
    shape.refuse(fmt::format("has an unknown key '{}'{}", key, nearest ? fmt::format(" (did you mean {}?)", *nearest) : ""));
  }
  ModelShape model;
  if (shape.has("name")) model.name = shape["name"].text();
  for (const char* needed : {"layers", "hidden", "heads"}) static_cast<void>(shape[needed]);
  read_size(shape, "layers", 1, model.layers, kDeepest);
  read_size(shape, "hidden", 1, model.hidden);
  read_size(shape, "heads", 1, model.heads);
  read_size(shape, "kv_heads", 0, model.kv_heads);
  read_size(shape, "mlp_hidden", 0, model.mlp_hidden);
  read_size(shape, "vocabulary", 1, model.vocabulary);
  read_size(shape, "sequence", 1, model.sequence, kMostTokens);
  read_flag(shape, "gated", model.gated);
  read_flag(shape, "biases", model.biases);
  read_flag(shape, "learned_positions", model.learned_positions);
  read_flag(shape, "rms_norm", model.rms_norm);
  read_flag(shape, "tied", model.tied);
  read_small(shape, "experts", 0, model.experts);
  read_small(shape, "expert_choices", 1, model.expert_choices);
  if (model.experts > 0 && model.expert_choices > model.experts) {
    shape["expert_choices"].refuse(fmt::format("is {}, more than there are experts ({})", model.expert_choices, model.experts));
  }
  shape["heads"].require(model.hidden % model.heads == 0,
                         fmt::format("is {}, which does not divide hidden {}", model.heads, model.hidden));
  if (model.heads % model.key_value_heads() != 0) {
    shape["kv_heads"].refuse(fmt::format("is {}, which does not divide heads {}", model.kv_heads, model.heads));
  }
  return model;
}

}  // namespace

double parameters_of_layer(const ModelShape& model) {
  const double h = real(model.hidden);
  const double f = real(model.mlp_width());
  double attention = matrices_of_attention(model);
  double mlp = matrices_of_mlp(model);
  if (model.biases) {
    attention += 2 * h + 2 * key_value_width(model);
    mlp += (model.gated ? 2.0 : 1.0) * f + h;
  }
  const double experts = model.experts;
  return attention + 2 * norm_width(model) + (model.experts > 0 ? experts * (mlp + h) : mlp);
}

double num_parameters(const ModelShape& model) {
  const double h = real(model.hidden);
  const double table = real(model.vocabulary) * h;
  return table + (model.learned_positions ? real(model.sequence) * h : 0.0) + real(model.layers) * parameters_of_layer(model) +
         norm_width(model) + (model.tied ? 0.0 : table);
}

double forward_flops_per_row(const ModelShape& model, std::int64_t sequence, AttentionFlops attention) {
  const double s = real(sequence);
  const double h = real(model.hidden);
  double mlp = matrices_of_mlp(model);
  if (model.experts > 0) mlp = mlp * model.expert_choices + h * model.experts;
  const double layer = 2 * (matrices_of_attention(model) + mlp) + (attention == AttentionFlops::full ? 4.0 : 2.0) * s * h;
  return s * (real(model.layers) * layer + 2 * real(model.vocabulary) * h);
}

ModelShape shape_of(const GptConfig& model, std::string name) {
  ModelShape shape;
  shape.name = std::move(name);
  shape.layers = model.layers;
  shape.hidden = model.hidden;
  shape.heads = model.heads;
  shape.mlp_hidden = model.mlp_hidden;
  shape.tied = model.tied;
  shape.vocabulary = model.vocabulary;
  shape.sequence = model.sequence;
  shape.experts = model.experts;
  shape.expert_choices = model.expert_choices;
  return shape;
}

std::optional<GptConfig> gpt_config_of(const ModelShape& shape) {
  const bool gpt =
      shape.key_value_heads() == shape.heads && !shape.gated && shape.biases && shape.learned_positions && !shape.rms_norm;
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  if (!gpt || shape.layers > kMost || shape.heads > kMost) return std::nullopt;
  GptConfig model;
  model.vocabulary = shape.vocabulary;
  model.sequence = shape.sequence;
  model.layers = static_cast<int>(shape.layers);
  model.hidden = shape.hidden;
  model.heads = static_cast<int>(shape.heads);
  model.mlp_hidden = shape.mlp_hidden;
  model.tied = shape.tied;
  model.experts = shape.experts;
  model.expert_choices = shape.expert_choices;
  return model;
}

GptConfig small_twin(const ModelShape& shape, int tensor, int stages) {
  constexpr std::int64_t kHeadSize = 16;
  constexpr std::int64_t kMostLayers = 8;  // where one a stage is fewer
  TANDEM_CHECK(tensor >= 1 && stages >= 1, fmt::format("a twin for tensor {} and {} stages", tensor, stages));
  GptConfig twin;
  const std::int64_t heads_of_rank = std::clamp<std::int64_t>(shape.heads / tensor, 1, tensor <= 4 ? 4 / tensor : 1);
  twin.heads = static_cast<int>(heads_of_rank * tensor);
  twin.hidden = twin.heads * kHeadSize;
  // The MLP's ratio, in whole columns of each tensor rank.
  const double columns = real(shape.mlp_width()) / real(shape.hidden) * real(twin.hidden) / tensor;
  twin.mlp_hidden = std::max<std::int64_t>(1, static_cast<std::int64_t>(columns)) * tensor;
  const std::int64_t of_stage = std::max<std::int64_t>(1, std::min(shape.layers, kMostLayers) / stages);
  twin.layers = static_cast<int>(of_stage * stages);
  twin.vocabulary = std::max<std::int64_t>(256, tensor);
  twin.sequence = 64;
  twin.tied = shape.tied;
  twin.experts = std::min(shape.experts, 8);
  twin.expert_choices = std::clamp(shape.expert_choices, 1, 2);
  return twin;
}

ModelShape model_shape_from_json(std::string_view text, std::string_view source_name) {
  const std::string source(source_name);
  const nlohmann::json parsed = parse_json_object(std::string(text), source);
  const JsonField file(source, parsed);
  ModelShape model;
  if (file.has("shape")) {
    file.require(parsed.size() == 1, "holds a shape and other things; a file has one shape or is a training configuration");
    model = shape_from(file["shape"]);
  } else {
    file.require(file.has("model"), R"(has neither "model" nor "shape")");
    const RunConfig config = config_from_json(text, source_name);
    validate(config.model);
    model = shape_of(config.model);
  }
  return model;
}

ModelShape read_model_shape(const std::string& path_or_name) {
  const NamedText file = read_file_or_shipped("model", "models", path_or_name);
  ModelShape model = model_shape_from_json(file.text, file.source_name);
  if (model.name.empty()) model.name = std::filesystem::path(file.source_name).stem().string();
  return model;
}

std::vector<std::string> shipped_models() { return shipped_names("models"); }

}  // namespace tandem

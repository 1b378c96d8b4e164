// SPDX-License-Identifier: Apache-2.0
#include "core/io/golden_set.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/safetensors.h"

namespace tandem {
namespace {

using nlohmann::json;

/// A JSON object together with where it stands, so that every complaint can name file and field.
class Fields {
 public:
  Fields(const json& object, std::string file, std::string prefix = "")
      : object_(object), file_(std::move(file)), prefix_(std::move(prefix)) {
    if (!object_.is_object())
      throw InputError(fmt::format("{}: {} is not a JSON object", file_, prefix_.empty() ? "it" : prefix_));
  }

  [[noreturn]] void refuse(std::string_view field, const std::string& why) const {
    throw InputError(fmt::format("{}: field \"{}{}\" {}", file_, prefix_, field, why));
  }
  [[nodiscard]] bool has(std::string_view field) const {
    return object_.contains(field) && !object_.at(std::string(field)).is_null();
  }
  [[nodiscard]] const json& at(std::string_view field) const {
    if (!has(field)) refuse(field, "is missing");
    return object_.at(std::string(field));
  }
  [[nodiscard]] Fields object(std::string_view field) const { return {at(field), file_, fmt::format("{}{}.", prefix_, field)}; }
  [[nodiscard]] std::int64_t integer(std::string_view field) const {
    if (!at(field).is_number_integer()) refuse(field, fmt::format("is {}, it must be an integer", at(field).dump()));
    return at(field).get<std::int64_t>();
  }
  [[nodiscard]] std::int64_t positive(std::string_view field) const {
    const std::int64_t value = integer(field);
    if (value < 1 || value > std::numeric_limits<std::int32_t>::max()) {
      refuse(field, fmt::format("is {}, it must lie in 1 .. 2^31 - 1", value));
    }
    return value;
  }
  [[nodiscard]] double number(std::string_view field) const {
    if (!at(field).is_number()) refuse(field, fmt::format("is {}, it must be a number", at(field).dump()));
    return at(field).get<double>();
  }
  [[nodiscard]] std::string text(std::string_view field) const {
    if (!at(field).is_string()) refuse(field, fmt::format("is {}, it must be a string", at(field).dump()));
    return at(field).get<std::string>();
  }
  [[nodiscard]] bool flag(std::string_view field) const {
    if (!at(field).is_boolean()) refuse(field, fmt::format("is {}, it must be true or false", at(field).dump()));
    return at(field).get<bool>();
  }
  void require_text(std::string_view field, std::string_view expected) const {
    const std::string value = text(field);
    if (value != expected) refuse(field, fmt::format("is \"{}\", only \"{}\" can be reproduced", value, expected));
  }
  [[nodiscard]] const std::string& file() const noexcept { return file_; }

 private:
  const json& object_;
  std::string file_;
  std::string prefix_;
};

json parse_config(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) throw InputError(fmt::format("{}: cannot be opened; is this the folder of a golden set?", file.string()));
  try {
    return json::parse(stream);
  } catch (const json::exception& error) {  // a number too large for a double is not an error of parsing to it
    throw InputError(fmt::format("{}: not valid JSON: {}", file.string(), error.what()));
  }
}

GptConfig read_model(const Fields& config) {
  config.require_text("model_type", "gpt2");
  config.require_text("activation_function", "gelu_new");
  GptConfig model;
  model.vocabulary = config.positive("vocab_size");
  model.sequence = config.positive("n_positions");
  model.hidden = config.positive("n_embd");
  model.layers = static_cast<int>(config.positive("n_layer"));
  model.heads = static_cast<int>(config.positive("n_head"));
  model.mlp_hidden = config.has("n_inner") ? config.positive("n_inner") : 0;
  model.tied = config.flag("tie_word_embeddings");
  model.layer_norm_epsilon = config.number("layer_norm_epsilon");
  for (const std::string_view field : {"embd_pdrop", "attn_pdrop", "resid_pdrop"}) {
    if (config.has(field) && config.number(field) != 0.0)
      config.refuse(field, "is not 0: masks of another program cannot be reproduced");
  }
  try {
    validate(model);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", config.file(), error.what()));
  }
  return model;
}

OptimizerConfig read_optimizer(const Fields& fields) {
  fields.require_text("name", "adamw");
  if (fields.integer("decay_min_dims") != 2) {
    fields.refuse("decay_min_dims", fmt::format("is {}, only 2 can be reproduced", fields.integer("decay_min_dims")));
  }
  OptimizerConfig optimizer;
  optimizer.kind = OptimizerKind::adamw;
  optimizer.learning_rate = fields.number("lr");
  optimizer.beta1 = fields.number("beta1");
  optimizer.beta2 = fields.number("beta2");
  optimizer.epsilon = fields.number("eps");
  optimizer.weight_decay = fields.number("weight_decay");
  optimizer.max_grad_norm = fields.number("max_grad_norm");
  return optimizer;
}

/// Values of a tensor that must have this shape.
template <class T>
std::vector<T> read_shaped(const SafetensorsFile& file, std::string_view name, const Shape& expected) {
  const Shape& shape = file.entry(name).shape;
  if (shape != expected) {
    throw InputError(fmt::format("{}: tensor \"{}\" has shape {}, config.json asks for {}", file.path().string(), name,
                                 to_string(shape), to_string(expected)));
  }
  return file.read_as<T>(name);
}

void require_ignored_beyond_lengths(const Batch& batch, std::span<const std::int32_t> lengths, const std::string& where) {
  for (std::int64_t row = 0; row < batch.rows; ++row) {
    const std::int32_t length = lengths[static_cast<std::size_t>(row)];
    if (length < 0 || length > batch.sequence) {
      throw InputError(fmt::format("{}: \"lengths\" of row {} is {}, rows have {} tokens", where, row, length, batch.sequence));
    }
    for (std::int64_t t = length; t < batch.sequence; ++t) {
      if (batch.targets[static_cast<std::size_t>(row * batch.sequence + t)] == kIgnoredTarget) continue;
      throw InputError(fmt::format("{}: row {} has \"lengths\" {} but a valid target at position {}", where, row, length, t));
    }
  }
}

std::vector<Batch> read_batches(const GoldenSet& set, std::int64_t sequence, const Fields& config) {
  const SafetensorsFile file(set.folder / "data.safetensors");
  const Shape of_rows = {set.steps, set.micro_batches, set.micro_batch_size};
  const Shape of_tokens = {set.steps, set.micro_batches, set.micro_batch_size, sequence};
  const auto inputs = read_shaped<std::int32_t>(file, "inputs", of_tokens);
  const auto targets = read_shaped<std::int32_t>(file, "targets", of_tokens);
  const auto lengths = read_shaped<std::int32_t>(file, "lengths", of_rows);
  const json& valid = config.at("valid_tokens_per_step");
  if (!valid.is_array() || static_cast<std::int64_t>(valid.size()) != set.steps) {
    config.refuse("valid_tokens_per_step", fmt::format("must be a list of {} numbers, one a step", set.steps));
  }

  const std::int64_t rows = set.micro_batches * set.micro_batch_size;
  std::vector<Batch> batches;
  for (std::int64_t step = 0; step < set.steps; ++step) {
    Batch batch = make_batch(rows, sequence);
    std::copy_n(inputs.begin() + step * rows * sequence, rows * sequence, batch.ids.begin());
    std::copy_n(targets.begin() + step * rows * sequence, rows * sequence, batch.targets.begin());
    const std::string where = fmt::format("{}: step {}", file.path().string(), step);
    require_ignored_beyond_lengths(
        batch, std::span(lengths).subspan(static_cast<std::size_t>(step * rows), static_cast<std::size_t>(rows)), where);
    try {
      validate_tokens(batch, set.model.vocabulary);
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}", where, error.what()));
    }
    const json& expected = valid[static_cast<std::size_t>(step)];
    if (expected != batch.valid_tokens()) {
      throw InputError(fmt::format("{}: {} valid targets, config.json says {}", where, batch.valid_tokens(), expected.dump()));
    }
    batches.push_back(std::move(batch));
  }
  return batches;
}

/// What the five result files share.
struct ResultReader {
  const GoldenSet& set;
  const Fields& deviation;  ///< "float32_deviation"
  const SafetensorsFile& summary;
  std::int64_t sample_stride;
  std::int64_t sample_min_numel;

  [[nodiscard]] GoldenResults read(const std::string& name) const {
    GoldenResults results{name, {}, deviation.object(name).number("worst_tensor_rel_l2")};
    const SafetensorsFile file(set.folder / (name + ".safetensors"));
    for (const ParameterSpec& parameter : gpt_parameters(set.model)) {
      GoldenTensor tensor;
      tensor.shape = parameter.shape;
      const std::int64_t count = parameter.num_elements();
      const bool sampled = sample_stride > 1 && count > sample_min_numel;
      tensor.stride = sampled ? sample_stride : 1;
      const Shape stored = sampled ? Shape{(count + sample_stride - 1) / sample_stride} : parameter.shape;
      tensor.values = read_shaped<double>(file, parameter.name, stored);
      tensor.stored = file.entry(parameter.name).dtype;
      const auto numbers = read_shaped<double>(summary, fmt::format("{}/{}", name, parameter.name), {3});
      tensor.summary = {numbers[0], numbers[1], numbers[2]};
      results.tensors.emplace(parameter.name, std::move(tensor));
    }
    return results;
  }
};

void read_trace(GoldenSet& set, const Fields& deviation) {
  const SafetensorsFile file(set.folder / "trace.safetensors");
  set.losses = read_shaped<double>(file, "loss", {set.steps});
  set.gradient_norms = read_shaped<double>(file, "grad_norm", {set.steps});
  set.clip_coefficients = read_shaped<double>(file, "clip_coef", {set.steps});
  set.loss_float32_deviation = deviation.number("loss_max_rel");
  set.norm_float32_deviation = deviation.number("grad_norm_max_rel");
}

/// [begin, end) of the elements that say nothing, or an empty interval.
Interval left_out(const GoldenTensor& expected, std::string_view name) {
  if (!name.ends_with("attn.c_attn.bias")) return {};
  const std::int64_t hidden = num_elements(expected.shape) / 3;
  return {hidden, 2 * hidden};
}

template <class Real>
void require_whole(const GoldenTensor& expected, std::string_view name, std::span<const Real> values) {
  TANDEM_CHECK(static_cast<std::int64_t>(values.size()) == num_elements(expected.shape),
               fmt::format("{} has {} values, its shape is {}", name, values.size(), to_string(expected.shape)));
}

}  // namespace

GoldenSet read_golden_set(const std::filesystem::path& folder) {
  const std::filesystem::path config_file = folder / "config.json";
  const json document = parse_config(config_file);
  const Fields config(document, config_file.string());
  config.require_text("format", "gpt2-golden-1");
  if (config.integer("ignore_index") != kIgnoredTarget) {
    config.refuse("ignore_index", fmt::format("is {}, only {} can be read", config.integer("ignore_index"), kIgnoredTarget));
  }
  GoldenSet set;
  set.folder = folder;
  set.name = config.text("name");
  set.model = read_model(config);
  set.optimizer = read_optimizer(config.object("optimizer"));
  set.steps = config.positive("steps");
  set.micro_batches = config.positive("micro_batches");
  set.micro_batch_size = config.positive("micro_batch_size");
  const std::int64_t sequence = config.positive("seq_len");
  if (sequence > set.model.sequence) {
    config.refuse("seq_len", fmt::format("is {}, longer than n_positions {}", sequence, set.model.sequence));
  }
  set.batches = read_batches(set, sequence, config);

  const SafetensorsFile initial(folder / "init.safetensors");
  for (const ParameterSpec& parameter : gpt_parameters(set.model)) {
    set.initial_parameters.emplace(parameter.name, read_shaped<float>(initial, parameter.name, parameter.shape));
  }
  const Fields deviation = config.object("float32_deviation");
  read_trace(set, deviation);
  const SafetensorsFile summary(folder / "summary.safetensors");
  const ResultReader reader{set, deviation, summary, config.positive("sample_stride"), config.integer("sample_min_numel")};
  set.gradients_step0 = reader.read("grads_step0");
  set.parameters_step1 = reader.read("params_step1");
  set.parameters_last = reader.read("params_stepK");
  set.first_moments_last = reader.read("adam_m_stepK");
  set.second_moments_last = reader.read("adam_v_stepK");
  return set;
}

template <class Real>
double golden_deviation(const GoldenTensor& expected, std::string_view name, std::span<const Real> values) {
  require_whole(expected, name, values);
  const Interval skipped = left_out(expected, name);
  double difference = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    const std::int64_t element_index = static_cast<std::int64_t>(i) * expected.stride;
    if (element_index >= skipped.begin && element_index < skipped.end) continue;
    const double wanted = expected.values[i];
    const double error = static_cast<double>(values[static_cast<std::size_t>(element_index)]) - wanted;
    difference += error * error;
    size += wanted * wanted;
  }
  return std::sqrt(difference) / (size > 0.0 ? std::sqrt(size) : 1.0);
}

template <class Real>
double golden_summary_deviation(const GoldenTensor& expected, std::string_view name, std::span<const Real> values) {
  require_whole(expected, name, values);
  if (left_out(expected, name).size() > 0) return 0.0;
  double sum = 0.0;
  double squares = 0.0;
  double max_abs = 0.0;
  for (const Real value : values) {
    sum += static_cast<double>(value);
    squares += static_cast<double>(value) * static_cast<double>(value);
    max_abs = std::max(max_abs, std::abs(static_cast<double>(value)));
  }
  const TensorSummary& wanted = expected.summary;
  const double unit = wanted.l2_norm > 0.0 ? wanted.l2_norm : 1.0;
  const double of_sum = std::abs(sum - wanted.sum) / (unit * std::sqrt(static_cast<double>(values.size())));
  const double of_norm = std::abs(std::sqrt(squares) - wanted.l2_norm) / unit;
  const double of_max = std::abs(max_abs - wanted.max_abs) / (wanted.max_abs > 0.0 ? wanted.max_abs : 1.0);
  // NaN in any value makes squares NaN; std::max with NaN as the second argument would lose it.
  return std::isnan(of_norm) ? of_norm : std::max({of_sum, of_norm, of_max});
}

template double golden_deviation(const GoldenTensor&, std::string_view, std::span<const float>);
template double golden_deviation(const GoldenTensor&, std::string_view, std::span<const double>);
template double golden_summary_deviation(const GoldenTensor&, std::string_view, std::span<const float>);
template double golden_summary_deviation(const GoldenTensor&, std::string_view, std::span<const double>);

}  // namespace tandem

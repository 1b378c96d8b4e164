// SPDX-License-Identifier: Apache-2.0
#include "core/io/trace_file_index.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/nearest_name.h"

namespace tandem {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kFormat = "tandem-trace-1";

// A JSON object that knows where it stands, so that each complaint names file and field.
class Node {
 public:
  Node(const json& object, std::string place) : object_(object), place_(std::move(place)) {
    if (!object_.is_object()) throw InputError(fmt::format("{} must be a JSON object", place_));
  }

  [[noreturn]] void refuse(std::string_view field, const std::string& why) const {
    throw InputError(fmt::format("{} field \"{}\" {}", place_, field, why));
  }
  void allow(std::initializer_list<std::string_view> fields) const {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(fields.begin(), fields.end(), key) != fields.end()) continue;
      const std::vector<std::string> known(fields.begin(), fields.end());
      const auto nearest = nearest_name(key, known);
      refuse(key, fmt::format("is not known{}", nearest ? fmt::format(", did you mean \"{}\"?", *nearest) : ""));
    }
  }
  [[nodiscard]] bool has(std::string_view field) const {
    return object_.contains(field) && !object_.at(std::string(field)).is_null();
  }
  [[nodiscard]] const json& at(std::string_view field) const {
    if (!has(field)) refuse(field, "is missing");
    return object_.at(std::string(field));
  }
  [[nodiscard]] std::int64_t integer(std::string_view field, std::int64_t least, std::int64_t most) const {
    const json& value = at(field);
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(most)) ||
        value.get<std::int64_t>() < least || value.get<std::int64_t>() > most) {
      refuse(field, fmt::format("is {}, it must be an integer in {} .. {}", value.dump(), least, most));
    }
    return value.get<std::int64_t>();
  }
  [[nodiscard]] std::int64_t integer_or(std::string_view field, std::int64_t otherwise) const {
    return has(field) ? integer(field, 0, std::numeric_limits<std::int32_t>::max()) : otherwise;
  }
  [[nodiscard]] double number(std::string_view field) const {
    if (!at(field).is_number()) refuse(field, fmt::format("is {}, it must be a number", at(field).dump()));
    return at(field).get<double>();
  }
  [[nodiscard]] double number_or(std::string_view field, double otherwise) const {
    return has(field) ? number(field) : otherwise;
  }
  [[nodiscard]] std::string text(std::string_view field) const {
    if (!at(field).is_string()) refuse(field, fmt::format("is {}, it must be a string", at(field).dump()));
    return at(field).get<std::string>();
  }
  [[nodiscard]] bool flag_or(std::string_view field, bool otherwise) const {
    if (!has(field)) return otherwise;
    if (!at(field).is_boolean()) refuse(field, fmt::format("is {}, it must be true or false", at(field).dump()));
    return at(field).get<bool>();
  }
  [[nodiscard]] const std::string& place() const noexcept { return place_; }

 private:
  const json& object_;
  std::string place_;
};

DType read_precision(const Node& node, std::string_view field) {
  const std::string text = node.text(field);
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    if (text == name(dtype)) return dtype;
  }
  node.refuse(field, fmt::format("is \"{}\", it must be fp64, fp32, fp16 or bf16", text));
}

int small(const Node& node, std::string_view field) {
  return static_cast<int>(node.integer(field, 1, std::numeric_limits<std::int32_t>::max()));
}

// Every layer is looked up by name: a number that no model has is refused before that takes hours.
constexpr std::int64_t kMostLayers = 100'000;

GptConfig read_model(const Node& node) {
  if (node.has("model_type") && node.text("model_type") != "gpt2") {
    node.refuse("model_type", fmt::format(R"(is "{}", only "gpt2" can be computed)", node.text("model_type")));
  }
  if (node.has("activation_function")) {
    const std::string activation = node.text("activation_function");
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh") {
      node.refuse("activation_function", fmt::format(R"(is "{}", only "gelu_new" (the tanh form) can be computed)", activation));
    }
  }
  GptConfig model;
  model.vocabulary = small(node, "vocab_size");
  model.sequence = small(node, "n_positions");
  model.hidden = small(node, "n_embd");
  model.layers = static_cast<int>(node.integer("n_layer", 1, kMostLayers));
  model.heads = small(node, "n_head");
  model.mlp_hidden = node.integer_or("n_inner", 0);
  if (model.mlp_hidden == 4 * model.hidden) model.mlp_hidden = 0;  // so that models are equal where they are the same
  model.tied = node.flag_or("tie_word_embeddings", true);
  model.layer_norm_epsilon = node.number_or("layer_norm_epsilon", 1e-5);
  model.embedding_dropout = node.number_or("embd_pdrop", 0);
  model.attention_dropout = node.number_or("attn_pdrop", 0);
  model.residual_dropout = node.number_or("resid_pdrop", 0);
  model.experts = static_cast<int>(node.integer_or("num_local_experts", 0));
  model.expert_choices = static_cast<int>(node.integer_or("num_experts_per_tok", 1));
  model.capacity_factor = node.number_or("capacity_factor", model.capacity_factor);
  model.auxiliary_loss_weight = node.number_or("router_aux_loss_coef", model.auxiliary_loss_weight);
  try {
    validate(model);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{} {}", node.place(), error.what()));
  }
  return model;
}

void read_dropout(const Node& node, TraceHeader& header) {
  const json& value = node.at("dropout");
  if (value == "off") return;
  if (value == "other") {
    header.dropout = TraceDropout::other;
    return;
  }
  if (!value.is_object()) {
    node.refuse("dropout", fmt::format(R"(is {}, it must be "off", "other" or {{"seed": .., "step": ..}})", value.dump()));
  }
  const Node masks(value, node.place() + " dropout:");
  masks.allow({"seed", "step"});
  header.dropout = TraceDropout::tandem;
  header.dropout_seed = static_cast<std::uint64_t>(masks.integer("seed", 0, std::numeric_limits<std::int64_t>::max()));
  header.dropout_step = static_cast<std::uint32_t>(masks.integer("step", 0, std::numeric_limits<std::uint32_t>::max()));
}

TraceHeader read_header(const Node& node, const std::string& file) {
  TraceHeader header;
  header.framework = node.text("framework");
  header.is_reference = node.flag_or("reference", false);
  header.precision = read_precision(node, "precision");
  header.accumulate = header.precision == DType::f64 ? DType::f64 : DType::f32;
  if (node.has("accumulate")) header.accumulate = read_precision(node, "accumulate");
  header.gradient_accumulate = node.has("gradient_accumulate") ? read_precision(node, "gradient_accumulate") : header.precision;
  header.loss_scale = node.number_or("loss_scale", 1);
  if (!(header.loss_scale > 0)) node.refuse("loss_scale", "must be positive");
  header.model = read_model({node.at("model"), file + ": model:"});
  header.step = node.has("step") ? node.integer("step", 0, std::numeric_limits<std::int64_t>::max()) : 0;
  read_dropout(node, header);
  if (node.has("loss")) header.loss = node.number("loss");
  header.ranks = node.has("ranks") ? small(node, "ranks") : 1;
  return header;
}

Interval read_interval(const Node& node, std::string_view field, const json& value) {
  const bool pair = value.is_array() && value.size() == 2 && value[0].is_number_integer() && value[1].is_number_integer();
  if (!pair) node.refuse(field, fmt::format("holds {}, an interval is [begin, end]", value.dump()));
  return {value[0].get<std::int64_t>(), value[1].get<std::int64_t>()};
}

ShardSpec read_shard(const Node& node, const std::string& name) {
  Shape shape;
  if (!node.at("shape").is_array()) node.refuse("shape", "must be a list of integers");
  for (const json& extent : node.at("shape")) {
    if (!extent.is_number_integer()) node.refuse("shape", fmt::format("holds {}, extents are integers", extent.dump()));
    shape.push_back(extent.get<std::int64_t>());
  }
  ShardSpec shard = whole(name, std::move(shape), DType::f32);
  if (node.has("slices")) {
    shard.slices.clear();
    if (!node.at("slices").is_array()) node.refuse("slices", "must be a list with a list of intervals for each dimension");
    for (const json& dimension : node.at("slices")) {
      if (!dimension.is_array()) node.refuse("slices", fmt::format("holds {}, it needs a list of intervals", dimension.dump()));
      auto& intervals = shard.slices.emplace_back();
      for (const json& interval : dimension) intervals.push_back(read_interval(node, "slices", interval));
    }
  }
  shard.padded_rows = node.integer_or("padded_rows", 0);
  if (node.has("flat_range")) shard.flat_range = read_interval(node, "flat_range", node.at("flat_range"));
  shard.partial_sum = node.flag_or("partial_sum", false);
  return shard;
}

TraceKind read_kind(const Node& node) {
  const auto kind = find_trace_kind(node.text("kind"));
  if (!kind) {
    node.refuse("kind", fmt::format("is \"{}\", it must be activation, activation_gradient, parameter or parameter_gradient",
                                    node.text("kind")));
  }
  return *kind;
}

TraceEntry read_entry(const Node& node, const std::string& common_file, std::int64_t head_size) {
  node.allow({"name", "kind", "file", "key", "shape", "slices", "padded_rows", "flat_range", "rank", "micro_batch", "partial_sum",
              "layout", "transposed", "phase"});
  TraceEntry entry;
  entry.name = node.text("name");
  entry.kind = read_kind(node);
  const bool gradient = entry.kind == TraceKind::activation_gradient || entry.kind == TraceKind::parameter_gradient;
  if (gradient != entry.name.starts_with("d.")) {
    node.refuse("name", fmt::format(R"(is "{}": names of gradients, and no others, begin with "d.")", entry.name));
  }
  if (node.has("phase") && node.text("phase") != (gradient ? "backward" : "forward")) {
    node.refuse("phase", fmt::format("is \"{}\", which kind {} is not", node.text("phase"), name(entry.kind)));
  }
  entry.file = node.has("file") ? node.text("file") : common_file;
  if (entry.file.empty()) node.refuse("file", "is missing, here and at the top");
  entry.key = node.has("key") ? node.text("key") : entry.name;
  entry.shard = read_shard(node, entry.name);
  entry.rank = static_cast<int>(node.integer_or("rank", 0));
  entry.micro_batch = static_cast<int>(node.integer_or("micro_batch", 0));
  entry.transposed = node.flag_or("transposed", false);
  if (node.has("layout")) {
    if (node.text("layout") != "megatron_qkv") {
      node.refuse("layout", fmt::format(R"(is "{}", only "megatron_qkv" is known)", node.text("layout")));
    }
    entry.megatron_qkv = true;
  }
  require_possible(entry, head_size, node.place() + " the entry");
  return entry;
}

ordered_json model_json(const GptConfig& model) {
  ordered_json object = {{"model_type", "gpt2"},
                         {"activation_function", "gelu_new"},
                         {"vocab_size", model.vocabulary},
                         {"n_positions", model.sequence},
                         {"n_embd", model.hidden},
                         {"n_layer", model.layers},
                         {"n_head", model.heads},
                         {"n_inner", model.mlp_width()},
                         {"tie_word_embeddings", model.tied},
                         {"layer_norm_epsilon", model.layer_norm_epsilon},
                         {"embd_pdrop", model.embedding_dropout},
                         {"attn_pdrop", model.attention_dropout},
                         {"resid_pdrop", model.residual_dropout}};
  if (model.experts > 0) {
    object["num_local_experts"] = model.experts;
    object["num_experts_per_tok"] = model.expert_choices;
    object["capacity_factor"] = model.capacity_factor;
    object["router_aux_loss_coef"] = model.auxiliary_loss_weight;
  }
  return object;
}

ordered_json entry_json(const TraceEntry& entry) {
  ordered_json object = {{"name", entry.name},
                         {"kind", name(entry.kind)},
                         {"file", entry.file},
                         {"key", entry.key},
                         {"shape", entry.shard.global_shape}};
  ordered_json slices = ordered_json::array();
  for (const auto& dimension : entry.shard.slices) {
    ordered_json intervals = ordered_json::array();
    for (const Interval& interval : dimension) intervals.push_back({interval.begin, interval.end});
    slices.push_back(std::move(intervals));
  }
  object["slices"] = std::move(slices);
  object["rank"] = entry.rank;
  object["micro_batch"] = entry.micro_batch;
  if (entry.shard.padded_rows > 0) object["padded_rows"] = entry.shard.padded_rows;
  if (entry.shard.flat_range) object["flat_range"] = {entry.shard.flat_range->begin, entry.shard.flat_range->end};
  if (entry.shard.partial_sum) object["partial_sum"] = true;
  if (entry.megatron_qkv) object["layout"] = "megatron_qkv";
  if (entry.transposed) object["transposed"] = true;
  return object;
}

json parse(std::string_view text, const std::string& file) {
  try {
    return json::parse(text);
  } catch (const json::exception& error) {
    throw InputError(fmt::format("{}: not valid JSON: {}", file, error.what()));
  }
}

}  // namespace

TraceIndex parse_trace_index(std::string_view text, const std::string& file) {
  const json document = parse(text, file);
  const Node node(document, file + ":");
  if (!node.has("format") || node.at("format") != kFormat) {
    node.refuse("format", fmt::format("must be \"{}\"; is this a trace? (docs/trace_format.md)", kFormat));
  }
  node.allow({"format", "framework", "reference", "precision", "accumulate", "gradient_accumulate", "loss_scale", "model", "step",
              "dropout", "loss", "ranks", "batch", "file", "entries"});
  TraceIndex index;
  index.header = read_header(node, file);
  if (node.has("batch")) index.batch_file = node.text("batch");
  const std::string common_file = node.has("file") ? node.text("file") : "";
  const json& entries = node.at("entries");
  if (!entries.is_array()) node.refuse("entries", "must be a list");
  for (std::size_t i = 0; i < entries.size(); ++i) {
    index.entries.push_back(
        read_entry({entries[i], fmt::format("{}: entries[{}]:", file, i)}, common_file, index.header.model.head_size()));
  }
  return index;
}

std::string to_json(const TraceIndex& index) {
  const TraceHeader& header = index.header;
  ordered_json document = {{"format", kFormat},
                           {"framework", header.framework},
                           {"reference", header.is_reference},
                           {"precision", name(header.precision)},
                           {"accumulate", name(header.accumulate)},
                           {"gradient_accumulate", name(header.gradient_accumulate)},
                           {"loss_scale", header.loss_scale},
                           {"model", model_json(header.model)},
                           {"step", header.step}};
  if (header.dropout == TraceDropout::tandem) {
    document["dropout"] = {{"seed", header.dropout_seed}, {"step", header.dropout_step}};
  } else {
    document["dropout"] = header.dropout == TraceDropout::off ? "off" : "other";
  }
  if (header.loss) document["loss"] = *header.loss;
  document["ranks"] = header.ranks;
  if (!index.batch_file.empty()) document["batch"] = index.batch_file;
  ordered_json entries = ordered_json::array();
  for (const TraceEntry& entry : index.entries) entries.push_back(entry_json(entry));
  document["entries"] = std::move(entries);
  return document.dump(1) + "\n";
}

}  // namespace tandem

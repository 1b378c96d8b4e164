// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/safetensors.h"
#include "core/model_config.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/hugging_face.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/checkpoint/shard_writer.h"
#include "optimized/engine/optimizer.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::int64_t kChunkElements = std::int64_t{1} << 18;

json read_json(const fs::path& file) {
  try {
    json value = json::parse(read_text_file(file));
    if (!value.is_object()) throw InputError(fmt::format("{} is not a JSON object", file.string()));
    return value;
  } catch (const json::exception& error) {
    throw InputError(fmt::format("{} is not JSON: {}", file.string(), error.what()));
  }
}

/// config.json of a GPT-2: what tandem can compute, or an InputError that names the field.
class ConfigReader {
 public:
  explicit ConfigReader(const fs::path& file) : file_(file.string()), json_(read_json(file)) {}

  [[nodiscard]] GptConfig read() const {
    require("model_type", "gpt2", "gpt2");
    const json activation = json_.value("activation_function", json("gelu_new"));
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh") {
      refuse("activation_function", "tandem has gelu_new, which is gelu_pytorch_tanh");
    }
    require("scale_attn_weights", true, true);
    require("scale_attn_by_inverse_layer_idx", false, false);
    require("add_cross_attention", false, false);
    require("quantization_config", nullptr, nullptr);
    GptConfig model;
    model.vocabulary = size("vocab_size");
    model.sequence = size("n_positions");
    model.hidden = size("n_embd");
    model.layers = static_cast<int>(size("n_layer"));
    model.heads = static_cast<int>(size("n_head"));
    const bool has_width = json_.contains("n_inner") && !json_["n_inner"].is_null();
    model.mlp_hidden = has_width && size("n_inner") != 4 * model.hidden ? size("n_inner") : 0;
    model.layer_norm_epsilon = real("layer_norm_epsilon", 1e-5);
    model.embedding_dropout = real("embd_pdrop", 0.1);
    model.attention_dropout = real("attn_pdrop", 0.1);
    model.residual_dropout = real("resid_pdrop", 0.1);
    const json tied = json_.value("tie_word_embeddings", json(true));
    if (!tied.is_boolean()) refuse("tie_word_embeddings", "true or false is needed");
    model.tied = tied.get<bool>();
    try {
      validate(model);
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}", file_, error.what()));
    }
    return model;
  }

 private:
  [[noreturn]] void refuse(const std::string& field, const std::string& why) const {
    throw InputError(
        fmt::format("{}: field \"{}\" is {}; {}", file_, field, json_.contains(field) ? json_[field].dump() : "missing", why));
  }
  void require(const std::string& field, const json& wanted, const json& otherwise) const {
    if (json_.value(field, otherwise) != wanted) refuse(field, fmt::format("tandem can import {} only", wanted.dump()));
  }
  [[nodiscard]] std::int64_t size(const std::string& field) const {
    constexpr std::int64_t kMost = 1'000'000'000;
    if (!json_.contains(field) || !json_[field].is_number_integer()) refuse(field, "a whole number is needed");
    const auto value = json_[field].get<std::int64_t>();
    if (value < 1 || value > kMost) refuse(field, fmt::format("1 to {} is possible", kMost));
    return value;
  }
  [[nodiscard]] double real(const std::string& field, double otherwise) const {
    if (!json_.contains(field)) return otherwise;
    if (!json_[field].is_number()) refuse(field, "a number is needed");
    return json_[field].get<double>();
  }

  std::string file_;
  json json_;
};

/// Where each tensor of a folder lies, by tandem's names.
class ImportedTensors {
 public:
  explicit ImportedTensors(const fs::path& folder) : folder_(folder) {
    std::error_code error;
    if (fs::exists(folder / "model.safetensors", error)) {
      add_file("model.safetensors");
      return;
    }
    const fs::path index = folder / "model.safetensors.index.json";
    if (!fs::exists(index, error)) {
      throw InputError(
          fmt::format("{} has neither model.safetensors nor model.safetensors.index.json; save the model with transformers' "
                      "save_pretrained()",
                      folder.string()));
    }
    add_files_of(index);
  }

  // Checks that these are exactly the model's, and no other.
  void require_fit(const GptConfig& model) const {
    std::vector<std::string> names;
    for (const ParameterSpec& parameter : gpt_parameters(model)) {
      names.push_back(parameter.name);
      const Place& place = at(parameter.name);
      const SafetensorsEntry& entry = place.file->entry(place.name);
      if (entry.dtype != DType::f32 && !is_16bit(entry.dtype)) {
        refuse(place, fmt::format("is {}; F32, F16 and BF16 can be imported", name(entry.dtype)));
      }
      if (entry.shape != parameter.shape) {
        refuse(place, fmt::format("has shape {}, config.json makes it {}", to_string(entry.shape), to_string(parameter.shape)));
      }
    }
    for (const auto& [own_name, place] : places_) {
      if (std::find(names.begin(), names.end(), own_name) != names.end()) continue;
      if (model.tied && own_name == "lm_head.weight") {
        require_same_as_embedding(place);
        continue;
      }
      refuse(place, "is no parameter of the GPT-2 that config.json describes");
    }
  }

  // Calls use(values) with all elements, in pieces.
  template <class Use>
  void read(const std::string& name, const Use& use) const {
    const Place& place = at(name);
    const SafetensorsEntry& entry = place.file->entry(place.name);
    const std::span<const std::byte> bytes = place.file->bytes(place.name);
    const std::size_t element_bytes = size_bytes(entry.dtype);
    std::vector<float> values;
    for (std::size_t first = 0; first < bytes.size(); first += kChunkElements * element_bytes) {
      const std::span<const std::byte> piece =
          bytes.subspan(first, std::min(bytes.size() - first, kChunkElements * element_bytes));
      values.resize(piece.size() / element_bytes);
      if (entry.dtype == DType::f32) {
        std::memcpy(values.data(), piece.data(), piece.size());
      } else {
        for (std::size_t i = 0; i < values.size(); ++i) {
          std::uint16_t bits = 0;
          std::memcpy(&bits, piece.data() + i * sizeof(bits), sizeof(bits));
          values[i] = entry.dtype == DType::f16 ? from_f16_bits(bits) : from_bf16_bits(bits);
        }
      }
      use(std::span<const float>(values));
    }
  }

 private:
  struct Place {
    const SafetensorsFile* file = nullptr;
    std::string name;  // in that file
  };

  [[noreturn]] static void refuse(const Place& place, const std::string& what) {
    throw InputError(fmt::format("{}: tensor {} {}", place.file->path().string(), place.name, what));
  }

  [[nodiscard]] const Place& at(const std::string& name) const {
    const auto found = places_.find(name);
    if (found == places_.end()) throw InputError(fmt::format("{}: there is no tensor {}", folder_.string(), name));
    return found->second;
  }

  void add_file(const std::string& file) {
    files_.push_back(std::make_unique<SafetensorsFile>(folder_ / file));
    static const std::regex kCausalMask(R"(h\.\d+\.attn\.(bias|masked_bias))");
    for (const SafetensorsEntry& entry : files_.back()->entries()) {
      constexpr std::string_view kPrefix = "transformer.";
      const std::string own = entry.name.starts_with(kPrefix) ? entry.name.substr(kPrefix.size()) : entry.name;
      if (std::regex_match(own, kCausalMask)) continue;
      const Place place = {files_.back().get(), entry.name};
      if (!places_.emplace(own, place).second) refuse(place, "is there twice");
    }
  }

  void add_files_of(const fs::path& index) {
    const json parsed = read_json(index);
    const json map = parsed.value("weight_map", json());
    if (!map.is_object()) throw InputError(fmt::format("{}: field \"weight_map\" is no object", index.string()));
    std::vector<std::string> names;
    for (const auto& [tensor, file] : map.items()) {
      if (!file.is_string() || file.get<std::string>().empty() || file.get<std::string>().find('/') != std::string::npos) {
        throw InputError(fmt::format("{}: {} lies in {}, which is no file name", index.string(), tensor, file.dump()));
      }
      names.push_back(file.get<std::string>());
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    for (const std::string& name : names) add_file(name);
  }

  void require_same_as_embedding(const Place& head) const {
    const Place& embedding = at("wte.weight");
    const std::span<const std::byte> a = head.file->bytes(head.name);
    const std::span<const std::byte> b = embedding.file->bytes(embedding.name);
    if (std::ranges::equal(a, b)) return;
    refuse(head, "differs from the embedding, although config.json ties them (tie_word_embeddings)");
  }

  fs::path folder_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> places_;
};

// The moments of an optimizer that has not seen a step.
void write_zeros(ShardWriter& writer, std::int64_t elements) {
  const std::vector<float> zeros(static_cast<std::size_t>(std::min(elements, kChunkElements)));
  for (std::int64_t left = elements; left > 0; left -= kChunkElements) {
    writer.write(std::as_bytes(std::span(zeros).first(static_cast<std::size_t>(std::min(left, kChunkElements)))));
  }
}

CheckpointManifest write_step(const ImportedTensors& tensors, const GptConfig& model, const fs::path& step_folder,
                              FileOperations& files) {
  CheckpointInfo info;
  info.config.model = model;
  info.data = "synthetic";
  info.learning_rate = scheduled_learning_rate(info.config.optimizer, info.config.schedule, 0, info.config.steps);
  CheckpointManifest manifest = make_manifest(info, {});
  std::vector<TensorHeading> headings;
  for (CheckpointTensor& tensor : manifest.tensors) {
    tensor.pieces = {{0, whole(tensor.name, tensor.shape, tensor.dtype)}};
    headings.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  ShardWriter writer(files, step_folder / shard_name(0), headings);
  for (const CheckpointTensor& tensor : manifest.tensors) {
    if (tensor.name.starts_with("m.") || tensor.name.starts_with("v.")) {
      write_zeros(writer, num_elements(tensor.shape));
    } else {
      tensors.read(tensor.name, [&](std::span<const float> values) { writer.write(std::as_bytes(values)); });
    }
  }
  manifest.files.push_back(writer.finish());
  return manifest;
}

}  // namespace

fs::path import_hugging_face(const fs::path& hugging_face_folder, const fs::path& out_folder, FileOperations* files) {
  std::error_code error;
  if (!fs::is_directory(hugging_face_folder, error)) {
    throw InputError(fmt::format("{} is no folder", hugging_face_folder.string()));
  }
  const GptConfig model = ConfigReader(hugging_face_folder / "config.json").read();
  const ImportedTensors tensors(hugging_face_folder);
  tensors.require_fit(model);
  if (fs::is_directory(out_folder, error) && !list_checkpoints(out_folder).empty()) {
    throw InputError(fmt::format("{} holds checkpoints already; name another folder", out_folder.string()));
  }
  FileOperations& system = files != nullptr ? *files : system_files();
  system.remove(unfinished_folder(out_folder, 0));
  const fs::path unfinished = make_unfinished_folder(system, out_folder, 0);
  try {
    return publish_checkpoint(system, write_step(tensors, model, unfinished, system), {.folder = out_folder});
  } catch (...) {
    fs::remove_all(unfinished, error);
    throw;
  }
}

}  // namespace tandem

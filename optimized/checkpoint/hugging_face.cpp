// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/hugging_face.h"

#include <cmath>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/safetensors.h"
#include "core/model_config.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/checkpoint/piece_reader.h"
#include "optimized/checkpoint/shard_writer.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string exported_name(const std::string& name) { return name == "lm_head.weight" ? name : "transformer." + name; }

std::string config_json(const GptConfig& model, DType dtype) {
  const Json config = {
      {"architectures", {"GPT2LMHeadModel"}},
      {"model_type", "gpt2"},
      {"vocab_size", model.vocabulary},
      {"n_positions", model.sequence},
      {"n_embd", model.hidden},
      {"n_layer", model.layers},
      {"n_head", model.heads},
      {"n_inner", model.mlp_width() == 4 * model.hidden ? Json() : Json(model.mlp_width())},
      {"activation_function", "gelu_new"},
      {"layer_norm_epsilon", model.layer_norm_epsilon},
      {"embd_pdrop", model.embedding_dropout},
      {"attn_pdrop", model.attention_dropout},
      {"resid_pdrop", model.residual_dropout},
      {"tie_word_embeddings", model.tied},
      {"scale_attn_weights", true},
      {"scale_attn_by_inverse_layer_idx", false},
      {"reorder_and_upcast_attn", false},
      {"initializer_range", 0.02},
      // A checkpoint does not know its tokenizer, and GPT-2's default of 50256 may lie outside the vocabulary.
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr},
      {"torch_dtype", dtype == DType::f32 ? "float32" : (dtype == DType::f16 ? "float16" : "bfloat16")},
  };
  return config.dump(2) + "\n";
}

void write_text(FileOperations& files, const fs::path& path, const std::string& text) {
  write_new_file(files, path, std::as_bytes(std::span(text)));
}

void write_values(ShardWriter& writer, const std::vector<float>& values, DType dtype, const std::string& name) {
  if (dtype == DType::f32) return writer.write(std::as_bytes(std::span(values)));
  std::vector<std::uint16_t> narrow(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    narrow[i] = dtype == DType::f16 ? to_f16_bits(values[i]) : to_bf16_bits(values[i]);
    if (std::isfinite(values[i]) && !std::isfinite(round_to(values[i], dtype))) {
      throw InputError(
          fmt::format("{} has {} at element {}, which {} cannot hold; export as fp32", name, values[i], i, tandem::name(dtype)));
    }
  }
  writer.write(std::as_bytes(std::span(narrow)));
}

// Parameters in definition order, cut where a file would become too large.
std::vector<std::vector<ParameterSpec>> deal_to_files(const GptConfig& model, const HuggingFaceExport& options) {
  std::vector<std::vector<ParameterSpec>> dealt(1);
  std::int64_t bytes = 0;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const std::int64_t own = parameter.num_elements() * static_cast<std::int64_t>(size_bytes(options.dtype));
    if (!dealt.back().empty() && bytes + own > options.max_file_bytes) {
      dealt.emplace_back();
      bytes = 0;
    }
    dealt.back().push_back(parameter);
    bytes += own;
  }
  return dealt;
}

std::vector<float> read_whole(PieceReader& reader, const CheckpointManifest& manifest, const ParameterSpec& parameter) {
  const CheckpointTensor& tensor = manifest.tensor(parameter.name);
  if (tensor.shape != parameter.shape) {
    throw InputError(fmt::format("{}: {} has shape {}, the model makes it {}", kManifestName, parameter.name,
                                 to_string(tensor.shape), to_string(parameter.shape)));
  }
  std::vector<float> values(static_cast<std::size_t>(parameter.num_elements()));
  reader.read(tensor, whole(parameter.name, parameter.shape, DType::f32), {values.data(), DType::f32, parameter.shape});
  return values;
}

HuggingFaceSummary write_files(const fs::path& step_folder, const CheckpointManifest& manifest, const fs::path& folder,
                               const HuggingFaceExport& options, FileOperations& files) {
  const std::vector<std::vector<ParameterSpec>> dealt = deal_to_files(manifest.info.config.model, options);
  PieceReader reader(step_folder, manifest);
  HuggingFaceSummary summary{.files = std::ssize(dealt)};
  Json weight_map = Json::object();
  for (std::size_t i = 0; i < dealt.size(); ++i) {
    const std::string file =
        dealt.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, dealt.size());
    std::vector<TensorHeading> headings;
    for (const ParameterSpec& parameter : dealt[i]) {
      headings.push_back({exported_name(parameter.name), options.dtype, parameter.shape});
      weight_map[headings.back().name] = file;
    }
    ShardWriter writer(files, folder / file, headings, {{"format", "pt"}});
    for (const ParameterSpec& parameter : dealt[i]) {
      write_values(writer, read_whole(reader, manifest, parameter), options.dtype, parameter.name);
      summary.parameters += parameter.num_elements();
    }
    summary.bytes += writer.finish().bytes;
  }
  if (dealt.size() > 1) {
    const std::int64_t total = summary.parameters * static_cast<std::int64_t>(size_bytes(options.dtype));
    const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    write_text(files, folder / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  return summary;
}

void require_empty(const fs::path& folder) {
  std::error_code error;
  if (!fs::exists(folder, error) || (fs::is_directory(folder, error) && fs::is_empty(folder, error))) return;
  throw InputError(fmt::format("{} exists and is not an empty folder; name another one", folder.string()));
}

}  // namespace

HuggingFaceSummary export_hugging_face(const fs::path& step_folder, const fs::path& out_folder,
                                       const HuggingFaceExport& options) {
  if (options.dtype != DType::f32 && !is_16bit(options.dtype)) {
    throw InputError(fmt::format("parameters are exported as fp32, bf16 or fp16, not as {}", name(options.dtype)));
  }
  const CheckpointManifest manifest = read_manifest_of(step_folder);
  const GptConfig& model = manifest.info.config.model;
  if (model.experts > 0) {
    throw InputError(fmt::format("{}: a model with experts has no counterpart in Hugging Face's GPT-2", step_folder.string()));
  }
  fs::path out = out_folder.lexically_normal();
  if (!out.has_filename()) out = out.parent_path();
  require_empty(out);
  FileOperations& files = options.files != nullptr ? *options.files : system_files();
  const fs::path beside = out.string() + ".unfinished";
  files.remove(beside);
  files.make_folder(beside);
  try {
    const HuggingFaceSummary summary = write_files(step_folder, manifest, beside, options, files);
    write_text(files, beside / "config.json", config_json(model, options.dtype));
    files.sync_folder(beside);
    files.rename(beside, out);
    files.sync_folder(out.parent_path());
    return summary;
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(beside, ignored);
    throw;
  }
}

}  // namespace tandem

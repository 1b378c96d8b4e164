// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/hugging_face.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/io/safetensors.h"
#include "core/io/test_folder.h"
#include "core/model_config.h"
#include "core/shard_runs.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/checkpoint/shard_writer.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Values = std::map<std::string, std::vector<float>>;

GptConfig small_model() {
  GptConfig model;
  model.vocabulary = 11;
  model.sequence = 5;
  model.layers = 2;
  model.hidden = 6;
  model.heads = 3;
  return model;
}

Values values_of(const GptConfig& model) {
  Values values;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    std::vector<float>& tensor = values[parameter.name];
    for (std::int64_t i = 0; i < parameter.num_elements(); ++i) {
      tensor.push_back(static_cast<float>(initial_value(model, parameter, Initialization::scattered, 7, i)));
    }
  }
  return values;
}

/// A folder as Hugging Face writes it, to be changed before it is written.
struct HuggingFaceFolder {
  GptConfig model = small_model();
  Values values = values_of(model);
  std::string prefix = "transformer.";
  std::string more_fields;
  std::map<std::string, Shape> shapes = {};

  fs::path write(const TestFolder& folder, const std::string& name = "hf") const {
    const fs::path path = folder / name;
    fs::create_directory(path);
    Values copies = values;
    std::vector<NamedTensor> tensors;
    std::map<std::string, Shape> shape_of = shapes;
    for (const ParameterSpec& parameter : gpt_parameters(model)) shape_of.emplace(parameter.name, parameter.shape);
    for (auto& [tensor, data] : copies) {
      const bool outside = tensor == "lm_head.weight";
      tensors.push_back({outside ? tensor : prefix + tensor, {data.data(), DType::f32, shape_of.at(tensor)}});
    }
    write_safetensors(path / "model.safetensors", tensors, {{"format", "pt"}});
    (void)folder.write(name + "/config.json", config());
    return path;
  }

  [[nodiscard]] std::string config() const {
    return "{\"model_type\": \"gpt2\", \"vocab_size\": 11, \"n_positions\": 5, \"n_embd\": 6, \"n_layer\": 2, \"n_head\": 3, "
           "\"n_inner\": null, \"embd_pdrop\": 0.0, \"tie_word_embeddings\": " +
           std::string(model.tied ? "true" : "false") + more_fields + "}";
  }
};

void expect_parameters(const fs::path& safetensors, const Values& values, const std::function<float(float)>& rounded) {
  const SafetensorsFile file(safetensors);
  EXPECT_EQ(file.entries().size(), values.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (const auto& [name, expected] : values) {
    std::vector<float> wanted = expected;
    for (float& value : wanted) value = rounded(value);
    EXPECT_EQ(file.read_as<float>(name == "lm_head.weight" ? name : "transformer." + name), wanted) << name;
  }
}

float same(float value) { return value; }

TEST(HuggingFace, ImportThenExportGivesTheSameParameters) {
  for (const bool tied : {true, false}) {
    const TestFolder folder;
    HuggingFaceFolder source;
    source.model.tied = tied;
    source.values = values_of(source.model);
    const fs::path step = import_hugging_face(source.write(folder), folder / "checkpoints");
    EXPECT_EQ(step, folder / "checkpoints" / "step-00000000");
    EXPECT_EQ(find_damage(step, VerifyDepth::contents), std::nullopt);
    const HuggingFaceSummary summary = export_hugging_face(step, folder / "out");
    EXPECT_EQ(summary.parameters, num_parameters(source.model));
    EXPECT_EQ(summary.files, 1);
    expect_parameters(folder / "out" / "model.safetensors", source.values, same);
    EXPECT_EQ(folder.num_files(), 3U);  // nothing unfinished is left
    const fs::path again = import_hugging_face(folder / "out", folder / "again");
    EXPECT_EQ(read_manifest_of(again).info.config.model, read_manifest_of(step).info.config.model);
  }
}

TEST(HuggingFace, ImportedStateIsThatOfARunThatHasNotBegun) {
  const TestFolder folder;
  HuggingFaceFolder source;
  source.more_fields = R"(, "attn_pdrop": 0.25, "layer_norm_epsilon": 1e-6, "n_inner": 24)";
  const fs::path step = import_hugging_face(source.write(folder), folder / "checkpoints");
  const CheckpointManifest manifest = read_manifest_of(step);
  EXPECT_EQ(manifest.info.next_step, 0);
  EXPECT_EQ(manifest.info.updates, 0);
  EXPECT_EQ(manifest.info.config.model.attention_dropout, 0.25);
  EXPECT_EQ(manifest.info.config.model.residual_dropout, 0.1);  // the format's default
  EXPECT_EQ(manifest.info.config.model.layer_norm_epsilon, 1e-6);
  const SafetensorsFile file(step / manifest.files.at(0).name);
  for (const std::string name : {"m.wte.weight", "v.h.1.mlp.c_fc.bias"}) {
    for (const float value : file.read_as<float>(name)) EXPECT_EQ(value, 0.0F);
  }
}

TEST(HuggingFace, ImportTakesOldNamesMasksAndTheTiedHead) {
  const TestFolder folder;
  HuggingFaceFolder source;
  source.prefix = "";
  const Values parameters = source.values;
  source.values["h.0.attn.bias"] = std::vector<float>(25, 1.0F);
  source.values["h.1.attn.masked_bias"] = {-1e4F};
  source.values["lm_head.weight"] = source.values["wte.weight"];
  source.shapes = {{"h.0.attn.bias", {1, 1, 5, 5}}, {"h.1.attn.masked_bias", {}}, {"lm_head.weight", {11, 6}}};
  (void)export_hugging_face(import_hugging_face(source.write(folder), folder / "checkpoints"), folder / "out");
  expect_parameters(folder / "out" / "model.safetensors", parameters, same);
}

TEST(HuggingFace, SixteenBitsAndSeveralFilesComeBackRoundedOnce) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const TestFolder folder;
    const HuggingFaceFolder source;
    const fs::path step = import_hugging_face(source.write(folder), folder / "checkpoints");
    const HuggingFaceSummary summary =
        export_hugging_face(step, folder / "narrow", {.dtype = dtype, .max_file_bytes = 500, .files = nullptr});
    EXPECT_GT(summary.files, 2);
    EXPECT_FALSE(fs::exists(folder / "narrow" / "model.safetensors"));
    (void)export_hugging_face(import_hugging_face(folder / "narrow", folder / "again"), folder / "wide");
    expect_parameters(folder / "wide" / "model.safetensors", source.values, [&](float x) { return round_to(x, dtype); });
  }
}

// The last tensor's columns are in two files, as tensor-parallel ranks write them.
TEST(HuggingFace, ExportPutsPiecesTogether) {
  const TestFolder folder;
  const GptConfig model = small_model();
  const Values values = values_of(model);
  CheckpointInfo info;
  info.config.model = model;
  info.next_step = 3;
  CheckpointManifest manifest = make_manifest(info, {});
  const fs::path unfinished = make_unfinished_folder(system_files(), folder / "run", 3);
  for (std::int64_t part = 0; part < 2; ++part) {
    std::vector<TensorHeading> headings;
    std::vector<float> data;
    for (CheckpointTensor& tensor : manifest.tensors) {
      ShardSpec shard = whole(tensor.name, tensor.shape, DType::f32);
      const std::int64_t extent = tensor.shape.back();
      shard.slices.back() = {part == 0 ? Interval{0, extent / 3} : Interval{extent / 3, extent}};
      headings.push_back({tensor.name, DType::f32, shard.local_shape()});
      const auto found = values.find(tensor.name);
      std::vector<double> global(static_cast<std::size_t>(num_elements(tensor.shape)));
      if (found != values.end()) global.assign(found->second.begin(), found->second.end());
      for (const double value : gather_from(shard, global)) data.push_back(static_cast<float>(value));
      tensor.pieces.push_back({static_cast<std::size_t>(part), shard});
    }
    ShardWriter writer(system_files(), unfinished / shard_name(static_cast<int>(part)), headings);
    writer.write(std::as_bytes(std::span(data)));
    manifest.files.push_back(writer.finish());
  }
  const fs::path step = publish_checkpoint(system_files(), manifest, {.folder = folder / "run"});
  (void)export_hugging_face(step, folder / "out");
  expect_parameters(folder / "out" / "model.safetensors", values, same);
}

TEST(HuggingFace, ExportRefusesWhatItCannotWrite) {
  const TestFolder folder;
  HuggingFaceFolder source;
  source.values["wpe.weight"][4] = 1e6F;
  const fs::path step = import_hugging_face(source.write(folder), folder / "checkpoints");
  const auto refusal = [&](const fs::path& out, DType dtype) {
    return message_of<InputError>([&] { (void)export_hugging_face(step, out, {.dtype = dtype}); });
  };
  EXPECT_NE(refusal(folder / "out", DType::f16).find("wpe.weight has 1000000 at element 4, which fp16 cannot hold"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(folder / "out"));
  EXPECT_EQ(folder.num_files(), 2U);
  EXPECT_NE(refusal(folder / "hf", DType::f32).find("not an empty folder"), std::string::npos);
  EXPECT_NE(refusal(folder / "out", DType::f64).find("not as fp64"), std::string::npos);
  fs::create_directory(folder / "empty");
  EXPECT_EQ(refusal(folder / "empty", DType::f32), "");
}

std::string import_refusal(const HuggingFaceFolder& source) {
  const TestFolder folder;
  const fs::path written = source.write(folder);
  const std::string message = message_of<InputError>([&] { (void)import_hugging_face(written, folder / "checkpoints"); });
  EXPECT_FALSE(fs::exists(folder / "checkpoints"));
  return message;
}

TEST(HuggingFace, ImportNamesTheTensorThatDoesNotFit) {
  HuggingFaceFolder source;
  source.values.erase("h.1.ln_2.bias");
  EXPECT_NE(import_refusal(source).find("there is no tensor h.1.ln_2.bias"), std::string::npos);
  source = {};
  source.values["h.0.crossattention.c_attn.weight"] = {1.0F};
  source.shapes["h.0.crossattention.c_attn.weight"] = {1};
  EXPECT_NE(import_refusal(source).find("tensor transformer.h.0.crossattention.c_attn.weight is no parameter"),
            std::string::npos);
  source = {};
  source.shapes["h.0.attn.c_attn.weight"] = {18, 6};
  EXPECT_NE(import_refusal(source).find("h.0.attn.c_attn.weight has shape [18, 6], config.json makes it [6, 18]"),
            std::string::npos);
  source = {};
  source.values["lm_head.weight"] = std::vector<float>(66, 0.5F);
  source.shapes["lm_head.weight"] = {11, 6};
  EXPECT_NE(import_refusal(source).find("lm_head.weight differs from the embedding"), std::string::npos);
}

TEST(HuggingFace, ImportNamesTheFieldThatDoesNotFit) {
  const auto refusal = [](const std::string& fields) {
    HuggingFaceFolder source;
    source.more_fields = ", " + fields;
    return import_refusal(source);
  };
  EXPECT_NE(refusal(R"("model_type": "llama")").find(R"(field "model_type" is "llama")"), std::string::npos);
  EXPECT_NE(refusal(R"("activation_function": "relu")").find(R"(field "activation_function" is "relu")"), std::string::npos);
  EXPECT_NE(refusal(R"("scale_attn_by_inverse_layer_idx": true)").find("scale_attn_by_inverse_layer_idx"), std::string::npos);
  EXPECT_NE(refusal(R"("n_layer": 1.5)").find(R"(field "n_layer" is 1.5; a whole number is needed)"), std::string::npos);
  EXPECT_NE(refusal(R"("n_head": 4)").find("config.json"), std::string::npos);
}

TEST(HuggingFace, ImportLeavesCheckpointsThatAreThereAlone) {
  const TestFolder folder;
  const fs::path source = HuggingFaceFolder().write(folder);
  (void)import_hugging_face(source, folder / "checkpoints");
  const auto again = [&] { (void)import_hugging_face(source, folder / "checkpoints"); };
  EXPECT_NE(message_of<InputError>(again).find("holds checkpoints already"), std::string::npos);
}

}  // namespace
}  // namespace tandem

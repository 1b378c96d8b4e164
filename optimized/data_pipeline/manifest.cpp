// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/manifest.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "tandem-data";
constexpr std::int64_t kVersion = 1;

template <class T>
T field(const json& object, const std::string& file, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) throw InputError(fmt::format("{} has no field '{}'", file, key));
  try {
    return found->get<T>();
  } catch (const json::exception&) {
    throw InputError(fmt::format("{}: field '{}' has {}, another type is needed", file, key, found->dump()));
  }
}

std::optional<Hash128> optional_hash(const json& object, const std::string& file, const char* key) {
  if (!object.contains(key)) return std::nullopt;
  return parse_hash128(field<std::string>(object, file, key));
}

}  // namespace

std::filesystem::path manifest_path(const std::filesystem::path& prefix) {
  std::filesystem::path path = prefix;
  return path += ".json";
}

std::string to_json(const DataManifest& manifest) {
  json object = {{"format", kFormat},
                 {"version", kVersion},
                 {"tokenizer", manifest.tokenizer},
                 {"vocabulary", manifest.vocabulary},
                 {"end_of_document", manifest.end_of_document},
                 {"document_rule", manifest.document_rule},
                 {"documents", manifest.documents},
                 {"tokens", manifest.tokens},
                 {"bin_xxh3_128", to_hex(manifest.bin_hash)}};
  if (manifest.idx_hash) object["idx_xxh3_128"] = to_hex(*manifest.idx_hash);
  if (manifest.model_hash) object["model_xxh3_128"] = to_hex(*manifest.model_hash);
  return object.dump(2) + "\n";
}

DataManifest parse_data_manifest(std::string_view text, const std::string& file) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) throw InputError(fmt::format("{} is not a JSON object; prepare the data again", file));
  const auto format = field<std::string>(object, file, "format");
  const auto version = field<std::int64_t>(object, file, "version");
  if (format != kFormat || version != kVersion) {
    throw InputError(fmt::format("{} has format '{}', version {}; this program reads '{}', version {}", file, format, version,
                                 kFormat, kVersion));
  }
  DataManifest manifest;
  manifest.tokenizer = field<std::string>(object, file, "tokenizer");
  manifest.vocabulary = field<std::int64_t>(object, file, "vocabulary");
  manifest.end_of_document = field<std::int32_t>(object, file, "end_of_document");
  manifest.document_rule = field<std::string>(object, file, "document_rule");
  manifest.documents = field<std::int64_t>(object, file, "documents");
  manifest.tokens = field<std::int64_t>(object, file, "tokens");
  manifest.bin_hash = parse_hash128(field<std::string>(object, file, "bin_xxh3_128"));
  manifest.idx_hash = optional_hash(object, file, "idx_xxh3_128");
  manifest.model_hash = optional_hash(object, file, "model_xxh3_128");
  if (manifest.vocabulary < 1) {
    throw InputError(fmt::format("{}: field 'vocabulary' is {}, it must be at least 1", file, manifest.vocabulary));
  }
  return manifest;
}

std::optional<DataManifest> read_manifest(const std::filesystem::path& prefix) {
  const std::filesystem::path path = manifest_path(prefix);
  if (!std::filesystem::exists(path)) return std::nullopt;
  return parse_data_manifest(read_text_file(path), path.string());
}

}  // namespace tandem

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
T field(const json& object, const std::filesystem::path& path, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) throw InputError(fmt::format("{} has no field '{}'", path.string(), key));
  try {
    return found->get<T>();
  } catch (const json::exception&) {
    throw InputError(fmt::format("{}: field '{}' has {}, another type is needed", path.string(), key, found->dump()));
  }
}

}  // namespace

std::filesystem::path manifest_path(const std::filesystem::path& prefix) {
  std::filesystem::path path = prefix;
  return path += ".json";
}

std::string to_json(const DataManifest& manifest) {
  return json{{"format", kFormat},
              {"version", kVersion},
              {"tokenizer", manifest.tokenizer},
              {"vocabulary", manifest.vocabulary},
              {"end_of_document", manifest.end_of_document},
              {"document_rule", manifest.document_rule},
              {"documents", manifest.documents},
              {"tokens", manifest.tokens},
              {"bin_xxh3_128", to_hex(manifest.bin_hash)}}
             .dump(2) +
         "\n";
}

std::optional<DataManifest> read_manifest(const std::filesystem::path& prefix) {
  const std::filesystem::path path = manifest_path(prefix);
  if (!std::filesystem::exists(path)) return std::nullopt;
  const json object = json::parse(read_text_file(path), nullptr, false);
  if (!object.is_object()) throw InputError(fmt::format("{} is not a JSON object", path.string()));
  const auto format = field<std::string>(object, path, "format");
  const auto version = field<std::int64_t>(object, path, "version");
  if (format != kFormat || version != kVersion) {
    throw InputError(fmt::format("{} has format '{}', version {}; this program reads '{}', version {}", path.string(), format,
                                 version, kFormat, kVersion));
  }
  DataManifest manifest;
  manifest.tokenizer = field<std::string>(object, path, "tokenizer");
  manifest.vocabulary = field<std::int64_t>(object, path, "vocabulary");
  manifest.end_of_document = field<std::int32_t>(object, path, "end_of_document");
  manifest.document_rule = field<std::string>(object, path, "document_rule");
  manifest.documents = field<std::int64_t>(object, path, "documents");
  manifest.tokens = field<std::int64_t>(object, path, "tokens");
  manifest.bin_hash = parse_hash128(field<std::string>(object, path, "bin_xxh3_128"));
  if (manifest.vocabulary < 1) {
    throw InputError(fmt::format("{}: field 'vocabulary' is {}, it must be at least 1", path.string(), manifest.vocabulary));
  }
  return manifest;
}

}  // namespace tandem

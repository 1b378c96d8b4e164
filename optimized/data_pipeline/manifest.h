// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "core/io/hash.h"

namespace tandem {

/// What PREFIX.json says about a prepared data set, beside the .bin and .idx that any program can read (docs/formats.md).
struct DataManifest {
  std::string tokenizer;
  std::int64_t vocabulary = 0;
  std::int32_t end_of_document = 0;
  std::string document_rule;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  Hash128 bin_hash;
  std::optional<Hash128> idx_hash = {};    ///< none in data prepared before it was kept
  std::optional<Hash128> model_hash = {};  ///< of PREFIX.model; none where the tokenizer needs none
};

[[nodiscard]] std::filesystem::path manifest_path(const std::filesystem::path& prefix);
[[nodiscard]] std::string to_json(const DataManifest& manifest);

/// Throws InputError, naming `file` and field, where the text is damaged.
[[nodiscard]] DataManifest parse_data_manifest(std::string_view text, const std::string& file);

/// Empty where there is no PREFIX.json. Throws InputError, naming file and field, where it is damaged.
[[nodiscard]] std::optional<DataManifest> read_manifest(const std::filesystem::path& prefix);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "harness/environment.h"
#include "harness/runner.h"

namespace tandem {

/// Everything that a run leaves behind. Format: results/schema.json, version kResultSchemaVersion.
struct ResultFile {
  Environment environment;
  bool interrupted = false;
  std::vector<CaseResult> cases;
};
inline constexpr int kResultSchemaVersion = 1;

/// Of each stage the tensor with the largest error over bound is written with both errors, floor and bound; spans are not
/// written. Numbers that are not finite become null. Throws ContractError where the text would break the schema.
[[nodiscard]] std::string to_json(const ResultFile& file);

/// Atomically: the file is there whole or not at all. Throws IoError.
void write_result_file(const std::filesystem::path& path, const ResultFile& file);

/// Inverse of to_json(), up to what is not written. `source_name` stands in error texts. Throws InputError, naming the file and
/// the field (as a JSON pointer), where the text is not JSON, breaks the schema, is of another version, or contradicts itself.
[[nodiscard]] ResultFile result_file_from_json(std::string_view text, std::string_view source_name);
[[nodiscard]] ResultFile read_result_file(const std::filesystem::path& path);

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tandem {

/// Checks JSON text against a JSON schema (draft 4). Empty when it conforms; otherwise the first offence in words, beginning with
/// the JSON pointer of the field: "/cases/3/status is not one of the allowed values". `text` must be valid JSON.
[[nodiscard]] std::optional<std::string> schema_offence(std::string_view text, std::string_view schema);

}  // namespace tandem

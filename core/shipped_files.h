// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Files of the source tree that travel inside the program: results/FOLDER/NAME.json for the folders links, clusters, models and
/// published. The text lives as long as the program.
[[nodiscard]] std::optional<std::string_view> shipped_file(std::string_view folder, std::string_view name);
/// Of one folder, sorted.
[[nodiscard]] std::vector<std::string> shipped_names(std::string_view folder);

/// The text of a file, or of the shipped one of this name, and what to call it in errors.
struct NamedText {
  std::string text, source_name;
};
/// Throws InputError where there is neither, with the nearest name: "cluster dgx-a10: no such file, and none of this name travels
/// with the program (did you mean dgx-a100?); there are ...". `what`: "cluster".
[[nodiscard]] NamedText read_file_or_shipped(std::string_view what, std::string_view folder, const std::string& path_or_name);

}  // namespace tandem

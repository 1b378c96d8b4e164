// SPDX-License-Identifier: Apache-2.0
#include "core/shipped_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/nearest_name.h"
#include "tandem_shipped_files.h"

namespace tandem {

std::optional<std::string_view> shipped_file(std::string_view folder, std::string_view name) {
  for (const ShippedFile& file : kShippedFiles) {
    if (file.folder == folder && file.name == name) return file.text;
  }
  return std::nullopt;
}

std::vector<std::string> shipped_names(std::string_view folder) {
  std::vector<std::string> names;
  for (const ShippedFile& file : kShippedFiles) {
    if (file.folder == folder) names.emplace_back(file.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

NamedText read_file_or_shipped(std::string_view what, std::string_view folder, const std::string& path_or_name) {
  if (const auto text = shipped_file(folder, path_or_name)) {
    return {std::string(*text), fmt::format("results/{}/{}.json", folder, path_or_name)};
  }
  std::error_code unusable;  // as a path: too long, say
  if (!std::filesystem::exists(path_or_name, unusable)) {
    const std::vector<std::string> names = shipped_names(folder);
    const auto nearest = nearest_name(path_or_name, names);
    throw InputError(fmt::format("{} {}: no such file, and none of this name travels with the program{}; there are {}", what,
                                 path_or_name, nearest ? fmt::format(" (did you mean {}?)", *nearest) : "",
                                 fmt::join(names, ", ")));
  }
  return {read_text_file(path_or_name), path_or_name};
}

}  // namespace tandem

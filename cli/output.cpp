// SPDX-License-Identifier: Apache-2.0
#include "cli/output.h"

#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/atomic_file.h"

namespace tandem {

void write_output(const std::string& file, const std::string& text) {
  if (file == "-") {
    fmt::print("{}", text);
    return;
  }
  write_file_atomically(file, text);
}

void require_writable(const std::string& file, const std::string& option) {
  if (file.empty() || file == "-") return;
  const std::filesystem::path path = std::filesystem::absolute(file);
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    throw InputError(fmt::format("{} {}: this is a folder; name a file", option, file));
  const std::filesystem::path folder = path.parent_path();
  if (!std::filesystem::is_directory(folder, error)) {
    throw InputError(fmt::format("{} {}: the folder {} does not exist", option, file, folder.string()));
  }
  if (access(folder.c_str(), W_OK) != 0)
    throw InputError(fmt::format("{} {}: the folder {} cannot be written to", option, file, folder.string()));
}

void require_writable_folder(const std::string& folder, const std::string& option) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw InputError(fmt::format("{} {}: cannot make this folder: {}", option, folder, error.message()));
  if (access(folder.c_str(), W_OK) != 0) throw InputError(fmt::format("{} {}: this folder cannot be written to", option, folder));
}

std::string not_empty(const std::string& text) { return text.empty() ? "must not be empty" : ""; }

std::string at_least_one(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= 1) return {};
  return fmt::format("'{}' must be a whole number of at least 1", text);
}

std::string positive_number(const std::string& text) {
  constexpr double kMost = 1e9;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value > 0 && value <= kMost) return {};
  return fmt::format("'{}' must be a number above 0, at most {}", text, kMost);
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "cli/output.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <system_error>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/atomic_file.h"

namespace tandem {
namespace {

// Tried, since permissions say nothing of a file system that makes no files (root may do all, and /proc takes none).
std::string why_not_writable(const std::filesystem::path& folder) {
  std::string name = folder / ".tandem-XXXXXX";
  const int file = mkstemp(name.data());
  if (file < 0) return std::error_code(errno, std::generic_category()).message();
  close(file);
  unlink(name.c_str());
  return {};
}

void require_writable_parent(const std::string& file, const std::string& option) {
  const std::filesystem::path folder = std::filesystem::absolute(file).parent_path();
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    throw InputError(fmt::format("{} {}: the folder {} does not exist", option, file, folder.string()));
  }
  if (const std::string why = why_not_writable(folder); !why.empty())
    throw InputError(fmt::format("{} {}: the folder {} cannot be written to: {}", option, file, folder.string(), why));
}

}  // namespace

void write_output(const std::string& file, const std::string& text) {
  if (file == "-") {
    fmt::print("{}", text);
    return;
  }
  write_file_atomically(file, text);
}

void require_writable(const std::string& file, const std::string& option) {
  if (file.empty() || file == "-") return;
  std::error_code error;
  if (std::filesystem::is_directory(file, error))
    throw InputError(fmt::format("{} {}: this is a folder; name a file", option, file));
  require_writable_parent(file, option);
}

void require_writable_prefix(const std::string& prefix, std::initializer_list<const char*> suffixes, const std::string& option) {
  if (prefix.empty()) return;
  std::error_code error;
  const std::filesystem::file_status there = std::filesystem::status(prefix, error);
  if (std::filesystem::is_other(there)) {
    throw InputError(
        fmt::format("{} {}: this is a device or a pipe; name a prefix for files, as in FOLDER/NAME", option, prefix));
  }
  for (const char* const suffix : suffixes) {
    const std::filesystem::file_status file = std::filesystem::status(prefix + suffix, error);
    if (!std::filesystem::exists(file) || std::filesystem::is_regular_file(file)) continue;
    throw InputError(
        fmt::format("{0} {1}: {1}{2} is to be written, and is there as something else than a file; choose another prefix", option,
                    prefix, suffix));
  }
  const std::filesystem::path folder = std::filesystem::absolute(prefix).parent_path();
  if (std::filesystem::equivalent(folder, "/dev", error)) {
    throw InputError(fmt::format("{} {}: /dev is for devices; name a prefix for files in another folder", option, prefix));
  }
  require_writable_parent(prefix, option);
}

void require_writable_folder(const std::string& folder, const std::string& option) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw InputError(fmt::format("{} {}: cannot make this folder: {}", option, folder, error.message()));
  if (const std::string why = why_not_writable(folder); !why.empty())
    throw InputError(fmt::format("{} {}: this folder cannot be written to: {}", option, folder, why));
}

void require_folder(const std::string& folder, const std::string& option, const std::string& advice) {
  if (folder.empty()) return;
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw InputError(fmt::format("{} {}: there is no such folder; {}", option, folder, advice));
  require_writable_folder(folder, option);
}

std::string not_empty(const std::string& text) { return text.empty() ? "must not be empty" : ""; }

std::string at_least_one(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= 1) return {};
  return fmt::format("'{}' must be a whole number of at least 1", text);
}

std::string whole_number(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return {};
  return fmt::format("'{}' must be a whole number from 0 to {}", text, std::numeric_limits<std::uint64_t>::max());
}

std::function<std::string(const std::string&)> number_between(double least, double most) {
  return [least, most](const std::string& text) -> std::string {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size() && value >= least && value <= most) return {};
    return fmt::format("'{}' must be a number from {} to {}", text, least, most);
  };
}

std::string positive_number(const std::string& text) {
  constexpr double kMost = 1e9;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value > 0 && value <= kMost) return {};
  return fmt::format("'{}' must be a number above 0, at most {}", text, kMost);
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include "core/config.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/config_fields.h"
#include "core/error.h"
#include "core/nearest_name.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// An integral number that a double or an unsigned JSON number may also hold (1e6, 3.0).
std::optional<std::int64_t> integer_of(const Json& value) {
  constexpr double kExact = 0x1p53;
  if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    return number <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())
               ? std::optional(static_cast<std::int64_t>(number))
               : std::nullopt;
  }
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const auto number = value.get<double>();
  return std::trunc(number) == number && std::abs(number) <= kExact ? std::optional(static_cast<std::int64_t>(number))
                                                                    : std::nullopt;
}

std::optional<std::uint64_t> unsigned_of(const Json& value) {
  if (value.is_number_unsigned()) return value.get<std::uint64_t>();
  const std::optional<std::int64_t> number = integer_of(value);
  return number && *number >= 0 ? std::optional(static_cast<std::uint64_t>(*number)) : std::nullopt;
}

// The value as the field wants it; empty where its type or its size is wrong.
std::optional<FieldValue> convert(const ConfigField& field, const Json& value) {
  switch (field.type) {
    case FieldType::flag: return value.is_boolean() ? std::optional<FieldValue>(value.get<bool>()) : std::nullopt;
    case FieldType::unsigned_integer: return unsigned_of(value);
    case FieldType::integer: {
      const std::optional<std::int64_t> number = integer_of(value);
      return number && field.range.contains(static_cast<double>(*number)) ? std::optional<FieldValue>(*number) : std::nullopt;
    }
    case FieldType::real: {
      if (!value.is_number()) return std::nullopt;
      const auto number = value.get<double>();
      return std::isfinite(number) && field.range.contains(number) ? std::optional<FieldValue>(number) : std::nullopt;
    }
    case FieldType::text:  // a number is how --set reads the text of one
      return value.is_string()           ? std::optional<FieldValue>(value.get<std::string>())
             : value.is_number_integer() ? std::optional<FieldValue>(value.dump())
                                         : std::nullopt;
    case FieldType::choice: break;
  }
  if (!value.is_string() || std::ranges::count(field.choices, value.get<std::string>()) == 0) return std::nullopt;
  return value.get<std::string>();
}

// For error texts: one short line, whatever bytes the user typed.
std::string shown(const Json& value) {
  constexpr std::size_t kLongest = 60;
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

void assign(RunConfig& config, const ConfigField& field, const Json& value, std::string_view source) {
  const std::optional<FieldValue> converted = convert(field, value);
  if (!converted) {
    throw InputError(
        fmt::format("{} is {} in {}; it must be {}", field.full_name(), shown(value), source, accepted_values(field)));
  }
  field.set(config, *converted);
}

const ConfigField* find_field(std::string_view section, std::string_view key) {
  const auto& fields = config_fields();
  const auto found = std::ranges::find_if(
      fields, [&](const ConfigField& field) { return field.key == key && (section.empty() || field.section == section); });
  return found == fields.end() ? nullptr : &*found;
}

std::vector<std::string> section_names() {
  std::vector<std::string> names;
  for (const ConfigField& field : config_fields()) {
    if (names.empty() || names.back() != field.section) names.push_back(field.section);
  }
  return names;
}

// What the user may have meant: the nearest key of any section, or else the keys of that section.
[[noreturn]] void throw_unknown_key(std::string_view section, std::string_view key, std::string_view source) {
  std::vector<std::string> keys;
  std::vector<std::string> same_section;
  for (const ConfigField& field : config_fields()) {
    keys.push_back(field.key);
    if (field.section == section) same_section.push_back(field.key);
  }
  const std::string written = section.empty() ? std::string(key) : fmt::format("{}.{}", section, key);
  const std::optional<std::string> nearest = nearest_name(key, keys);
  if (nearest) {
    const ConfigField& meant = *find_field("", *nearest);
    throw InputError(fmt::format("unknown key '{}' in {}; did you mean '{}'?", written, source, meant.full_name()));
  }
  if (same_section.empty()) throw InputError(fmt::format("unknown key '{}' in {}; --help lists the keys", written, source));
  throw InputError(
      fmt::format("unknown key '{}' in {}; the keys of '{}' are: {}", written, source, section, fmt::join(same_section, ", ")));
}

[[noreturn]] void throw_unknown_section(std::string_view section, std::string_view source) {
  const std::vector<std::string> sections = section_names();
  if (const ConfigField* field = find_field("", section)) {
    throw InputError(fmt::format("key '{}' in {} belongs into the section '{}'", section, source, field->section));
  }
  if (const std::optional<std::string> nearest = nearest_name(section, sections)) {
    throw InputError(fmt::format("unknown section '{}' in {}; did you mean '{}'?", section, source, *nearest));
  }
  throw InputError(fmt::format("unknown section '{}' in {}; the sections are: {}", section, source, fmt::join(sections, ", ")));
}

// "line 3, column 5" of a byte counted from 1.
std::string place_of(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, byte == 0 ? 0 : std::min(byte - 1, text.size()));
  const auto line = std::ranges::count(before, '\n') + 1;
  const std::size_t line_start = before.rfind('\n');
  return fmt::format("line {}, column {}", line, before.size() - (line_start == std::string_view::npos ? 0 : line_start + 1) + 1);
}

// The library's own prefix repeats the place and a number that means nothing to a user.
std::string reason_of(const Json::exception& error) {
  std::string_view reason = error.what();
  for (const std::string_view mark : {"syntax error while parsing", "number overflow"}) {
    if (const auto at = reason.find(mark); at != std::string_view::npos) return std::string(reason.substr(at));
  }
  const auto bracket = reason.find("] ");
  return std::string(bracket == std::string_view::npos ? reason : reason.substr(bracket + 2));
}

// A key that is written twice would silently lose its first value, so it is an error.
Json parse_unique(std::string_view text, std::string_view source) {
  std::vector<std::set<std::string>> open_objects;
  const auto watch = [&](int /*depth*/, Json::parse_event_t event, const Json& parsed) {
    if (event == Json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == Json::parse_event_t::object_end) open_objects.pop_back();
    if (event == Json::parse_event_t::key && !open_objects.back().insert(parsed.get<std::string>()).second) {
      throw InputError(fmt::format("key '{}' appears twice in {}", parsed.get<std::string>(), source));
    }
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const Json::parse_error& error) {
    if (text.empty())
      throw InputError(fmt::format("{} is empty; a JSON object with sections such as \"model\" is needed", source));
    throw InputError(fmt::format("{} is not valid JSON, {}: {}", source, place_of(text, error.byte), reason_of(error)));
  } catch (const Json::exception& error) {
    throw InputError(fmt::format("{} cannot be read as JSON: {}", source, reason_of(error)));
  }
}

Json to_json_value(const FieldValue& value) {
  return std::visit([](const auto& held) { return Json(held); }, value);
}

struct Entry {
  const ConfigField* field;
  Json value;
};

std::vector<Entry> entries_of(const Json& document, std::string_view source) {
  if (!document.is_object()) throw InputError(fmt::format("{} must hold a JSON object with sections such as \"model\"", source));
  const std::vector<std::string> sections = section_names();
  std::vector<Entry> entries;
  for (const auto& [section, keys] : document.items()) {
    if (std::ranges::count(sections, section) == 0) throw_unknown_section(section, source);
    if (!keys.is_object()) throw InputError(fmt::format("'{}' is {} in {}; it must be an object", section, shown(keys), source));
    for (const auto& [key, value] : keys.items()) {
      const ConfigField* field = find_field(section, key);
      if (field == nullptr) throw_unknown_key(section, key, source);
      entries.push_back({field, value});
    }
  }
  std::stable_partition(entries.begin(), entries.end(), [](const Entry& entry) { return entry.field->shorthand; });
  return entries;
}

}  // namespace

RunConfig config_from_json(std::string_view text, std::string_view source_name) {
  RunConfig config;
  for (const Entry& entry : entries_of(parse_unique(text, source_name), source_name)) {
    assign(config, *entry.field, entry.value, source_name);
  }
  return config;
}

RunConfig read_config(const std::filesystem::path& file) {
  std::error_code error;
  if (std::filesystem::is_directory(file, error))
    throw InputError(fmt::format("config {} is a directory, not a file", file.string()));
  std::ifstream stream(file, std::ios::binary);
  if (!stream)
    throw InputError(fmt::format("config {} cannot be read: {}", file.string(), std::generic_category().message(errno)));
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (stream.bad()) throw IoError(fmt::format("reading config {} failed", file.string()));
  return config_from_json(text, file.string());
}

void set_option(RunConfig& config, std::string_view assignment) {
  const std::string source = fmt::format("--set {}", assignment);
  const auto equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    throw InputError(fmt::format("{} is not of the form key=value", source));
  }
  const std::string_view name = assignment.substr(0, equals);
  const std::string_view text = assignment.substr(equals + 1);
  const auto dot = name.find('.');
  const std::string_view section = dot == std::string_view::npos ? "" : name.substr(0, dot);
  const std::string_view key = dot == std::string_view::npos ? name : name.substr(dot + 1);
  const ConfigField* field = find_field(section, key);
  if (field == nullptr) throw_unknown_key(section, key, source);
  // A word such as adamw is not JSON and stands for itself.
  Json value;
  try {
    value = Json::parse(text);
  } catch (const Json::exception&) {
    value = std::string(text);
  }
  assign(config, *field, value, source);
}

std::string to_json(const RunConfig& config) {
  Json document = Json::object();
  for (const ConfigField& field : config_fields()) {
    if (!field.shorthand) document[field.section][field.key] = to_json_value(field.get(config));
  }
  return document.dump(2) + "\n";
}

std::vector<std::string> describe_options() {
  const RunConfig defaults;
  std::vector<std::string> lines;
  for (const ConfigField& field : config_fields()) {
    const Json value = field.shorthand ? Json("-") : to_json_value(field.get(defaults));
    lines.push_back(fmt::format("{:<33} {:<17} {:<9} {}", field.full_name(), type_column(field),
                                value.is_string() ? value.get<std::string>() : value.dump(), field.meaning));
  }
  return lines;
}

}  // namespace tandem

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "harness/pitfall_report.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr std::array<const char*, 5> kTextKeys = {"name", "technique", "class", "what", "modelled_on"};
constexpr std::array<const char*, 2> kListKeys = {"caught_by", "with"};
constexpr const char* kOptionalTextKey = "first_bad_tensor";
constexpr const char* kOptionalListKey = "not_caught_by";

void check_keys(const Json& entry, const std::string& where) {
  if (!entry.is_object()) throw InputError(fmt::format("{} is no object", where));
  for (const auto& [key, value] : entry.items()) {
    const bool is_text = key == kOptionalTextKey || std::ranges::count(kTextKeys, key) > 0;
    const bool is_list = key == kOptionalListKey || std::ranges::count(kListKeys, key) > 0;
    if (!is_text && !is_list) throw InputError(fmt::format("{}/{} is an unknown key", where, key));
    const bool fits = is_text ? value.is_string()
                              : value.is_array() && std::ranges::all_of(value, [](const Json& item) { return item.is_string(); });
    if (!fits) throw InputError(fmt::format("{}/{} must be {}", where, key, is_text ? "a text" : "a list of texts"));
  }
  const auto require = [&](const char* key) {
    if (!entry.contains(key)) throw InputError(fmt::format("{}/{} is missing", where, key));
  };
  std::ranges::for_each(kTextKeys, require);
  std::ranges::for_each(kListKeys, require);
  const auto refuse_empty = [&](const char* key, const Json& empty) {
    if (entry.contains(key) && entry[key] == empty) throw InputError(fmt::format("{}/{} is empty: leave it out", where, key));
  };
  refuse_empty(kOptionalTextKey, "");
  refuse_empty(kOptionalListKey, Json::array());
}

Pitfall pitfall_called(const std::string& name, const std::string& where) {
  const std::optional<Pitfall> pitfall = find_pitfall(name);
  if (!pitfall) throw InputError(fmt::format("{} is '{}', which is no pitfall", where, name));
  return *pitfall;
}

PitfallInfo read_entry(const Json& entry, const std::string& where) {
  check_keys(entry, where);
  PitfallInfo info;
  info.pitfall = pitfall_called(entry["name"], where + "/name");
  info.technique = entry["technique"];
  info.fault_class = entry["class"];
  info.what = entry["what"];
  info.modelled_on = entry["modelled_on"];
  info.caught_by = entry["caught_by"].get<std::vector<std::string>>();
  if (info.caught_by.empty()) throw InputError(fmt::format("{}/caught_by is empty: nothing would have to catch it", where));
  info.first_bad_tensor = entry.value(kOptionalTextKey, std::string());
  info.not_caught_by = entry.value(kOptionalListKey, std::vector<std::string>());
  for (const std::string& other : entry["with"].get<std::vector<std::string>>()) {
    info.with.push_back(pitfall_called(other, where + "/with"));
  }
  return info;
}

Json parse_list(std::string_view text, std::string_view source) {
  Json document;
  try {
    document = Json::parse(text);
  } catch (const Json::parse_error& error) {
    throw InputError(fmt::format("{} is not valid JSON: error at byte {}", source, error.byte));
  }
  if (!document.is_object() || document.value("schema_version", 0) != 1 || !document.contains("pitfalls") ||
      !document["pitfalls"].is_array()) {
    throw InputError(fmt::format(R"({} must be an object with "schema_version": 1 and a list "pitfalls")", source));
  }
  return document["pitfalls"];
}

}  // namespace

std::vector<PitfallInfo> pitfalls_from_json(std::string_view text, std::string_view source_name) {
  std::vector<PitfallInfo> infos;
  std::set<Pitfall> seen;
  for (const Json& entry : parse_list(text, source_name)) {
    infos.push_back(read_entry(entry, fmt::format("{}: /pitfalls/{}", source_name, infos.size())));
    if (!seen.insert(infos.back().pitfall).second) {
      throw InputError(fmt::format("{} describes pitfall {} twice", source_name, name(infos.back().pitfall)));
    }
  }
  for (const Pitfall pitfall : all_pitfalls()) {
    if (!seen.contains(pitfall)) throw InputError(fmt::format("{} does not describe pitfall {}", source_name, name(pitfall)));
  }
  std::ranges::sort(infos, {}, &PitfallInfo::pitfall);
  return infos;
}

}  // namespace tandem

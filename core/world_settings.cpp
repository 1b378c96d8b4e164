// SPDX-License-Identifier: Apache-2.0
#include "core/world_settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/shipped_files.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::pair<CollectiveAlgorithm, std::string_view>, 6> kAlgorithms = {{
    {CollectiveAlgorithm::automatic, "automatic"},
    {CollectiveAlgorithm::direct, "direct"},
    {CollectiveAlgorithm::ring, "ring"},
    {CollectiveAlgorithm::recursive, "recursive"},
    {CollectiveAlgorithm::tree, "tree"},
    {CollectiveAlgorithm::hierarchical, "hierarchical"},
}};

// Reads the members of one JSON object; whatever is wrong is said with the file and the field.
class ObjectReader {
 public:
  ObjectReader(const Json& json, std::string source, std::string prefix)
      : json_(json), source_(std::move(source)), prefix_(std::move(prefix)) {
    if (!json_.is_object()) throw InputError(fmt::format("{}: {} must be an object", source_, prefix_.empty() ? "it" : prefix_));
  }

  [[noreturn]] void refuse(const std::string& key, std::string_view why) const {
    throw InputError(fmt::format("{}: {}{} {}", source_, prefix_.empty() ? "" : prefix_ + ".", key, why));
  }

  [[nodiscard]] const Json& required(const std::string& key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) refuse(key, "is missing");
    return *found;
  }
  [[nodiscard]] std::string text(const std::string& key) const {
    const Json& value = required(key);
    if (!value.is_string()) refuse(key, "must be a string");
    return value.get<std::string>();
  }
  [[nodiscard]] double number(const std::string& key, double low) const {
    const Json& value = required(key);
    if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < low) {
      refuse(key, fmt::format("must be a number of at least {}", low));
    }
    return value.get<double>();
  }
  [[nodiscard]] double number_or(const std::string& key, double low, double otherwise) const {
    return json_.contains(key) ? number(key, low) : otherwise;
  }
  template <class Integer>
  [[nodiscard]] Integer integer_or(const std::string& key, std::int64_t low, Integer otherwise) const {
    if (!json_.contains(key)) return otherwise;
    const Json& value = required(key);
    const bool fits = value.is_number_integer() && value.get<std::int64_t>() >= low &&
                      value.get<std::int64_t>() <= std::numeric_limits<int>::max();
    if (!fits) refuse(key, fmt::format("must be an integer of at least {}", low));
    return static_cast<Integer>(value.get<std::int64_t>());
  }
  void only(std::initializer_list<std::string_view> keys) const {
    for (const auto& [key, value] : json_.items()) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) refuse(key, "is unknown");
    }
  }

 private:
  const Json& json_;
  const std::string source_, prefix_;
};

LinkLevel level_from(const Json& json, const std::string& source, const std::string& key) {
  const ObjectReader reader(json, source, key);
  reader.only({"latency_seconds", "bytes_per_second", "jitter"});
  return {reader.number("latency_seconds", 0), reader.number("bytes_per_second", 0), reader.number_or("jitter", 0, 0)};
}

LinkProfile profile_from(const std::string& text, const std::string& source) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::parse_error& error) {
    throw InputError(fmt::format("{}: not JSON at byte {} of {}: truncated or damaged", source, error.byte, text.size()));
  } catch (const Json::exception& error) {  // a number too large for a double
    throw InputError(fmt::format("{}: not JSON: {}", source, error.what()));
  }
  const ObjectReader reader(json, source, "");
  reader.only({"name", "description", "ranks_per_node", "in_node", "between_nodes", "dilation", "jitter_seed"});
  LinkProfile profile;
  profile.name = reader.text("name");
  profile.description = reader.text("description");
  profile.ranks_per_node = reader.integer_or("ranks_per_node", 1, 1);
  profile.in_node = level_from(reader.required("in_node"), source, "in_node");
  profile.between_nodes = level_from(reader.required("between_nodes"), source, "between_nodes");
  profile.dilation = reader.number_or("dilation", 0, 1);
  if (profile.dilation <= 0) reader.refuse("dilation", "must be above 0");
  profile.jitter_seed = reader.integer_or("jitter_seed", 0, std::uint64_t{1});
  return profile;
}

double override_value(const std::string& link, std::string_view key, std::string_view text, double low) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value < low) {
    throw InputError(fmt::format("link {}: {}={}: must be a number of at least {}", link, key, text, low));
  }
  return value;
}

void apply_override(LinkProfile& profile, const std::string& link, std::string_view item) {
  const std::size_t equals = item.find('=');
  const std::string_view key = item.substr(0, equals);
  const std::string_view value = equals == std::string_view::npos ? "" : item.substr(equals + 1);
  if (key == "dilation") {
    profile.dilation = override_value(link, key, value, 1e-9);
  } else if (key == "jitter") {
    profile.in_node.jitter = profile.between_nodes.jitter = override_value(link, key, value, 0);
  } else if (key == "ranks_per_node") {
    const double ranks = override_value(link, key, value, 1);
    if (ranks != std::floor(ranks) || ranks > std::numeric_limits<int>::max()) {
      throw InputError(fmt::format("link {}: {}={}: must be an integer", link, key, value));
    }
    profile.ranks_per_node = static_cast<int>(ranks);
  } else {
    throw InputError(fmt::format("link {}: {} is unknown; there are dilation=, jitter= and ranks_per_node=", link, key));
  }
}

}  // namespace

std::string_view name(CollectiveAlgorithm algorithm) {
  for (const auto& [value, word] : kAlgorithms) {
    if (value == algorithm) return word;
  }
  return "?";
}

std::optional<CollectiveAlgorithm> find_algorithm(std::string_view name) {
  for (const auto& [value, word] : kAlgorithms) {
    if (word == name) return value;
  }
  return std::nullopt;
}

std::vector<CollectiveAlgorithm> all_algorithms() {
  std::vector<CollectiveAlgorithm> all;
  for (const auto& [value, word] : kAlgorithms) all.push_back(value);
  return all;
}

LinkLevel LinkProfile::level(int rank, int other) const noexcept {
  LinkLevel level = same_node(rank, other) ? in_node : between_nodes;
  level.latency_seconds *= dilation;
  level.bytes_per_second /= dilation;
  return level;
}

bool LinkProfile::is_shaped() const noexcept {
  const auto takes_time = [](const LinkLevel& level) { return level.latency_seconds > 0 || level.bytes_per_second > 0; };
  return takes_time(in_node) || takes_time(between_nodes);
}

std::vector<std::string> shipped_link_profiles() { return shipped_names("links"); }

LinkProfile read_link_profile(const std::string& path_or_name) {
  const NamedText text = read_file_or_shipped("link", "links", path_or_name);
  return profile_from(text.text, text.source_name);
}

std::optional<LinkProfile> parse_link(const std::string& text) {
  if (text == "none") return std::nullopt;
  std::size_t end = text.find(',');
  LinkProfile profile = read_link_profile(text.substr(0, end));
  while (end != std::string::npos) {
    const std::size_t begin = end + 1;
    end = text.find(',', begin);
    apply_override(profile, profile.name, std::string_view(text).substr(begin, end == std::string::npos ? end : end - begin));
  }
  return profile;
}

std::string describe(const LinkProfile& link) {
  std::string text = link.name;
  if (link.dilation != 1) text += fmt::format(" dilated {:g} x", link.dilation);
  const double jitter = std::max(link.in_node.jitter, link.between_nodes.jitter);
  if (jitter > 0) text += fmt::format(" with jitter {:g}", jitter);
  return text;
}

std::string WorldSettings::describe() const {
  std::string text = transport;
  if (link) text += fmt::format(", link {}", tandem::describe(*link));
  if (algorithm != CollectiveAlgorithm::direct) text += fmt::format(", algorithm {}", name(algorithm));
  if (adversary) text += fmt::format(", adversary {}", adversary->seed);
  if (own_parts) text += ", own " + own_parts->name;
  return text;
}

}  // namespace tandem

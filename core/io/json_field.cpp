// SPDX-License-Identifier: Apache-2.0
#include "core/io/json_field.h"

#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tandem {

void JsonField::refuse(const std::string& what) const {
  throw InputError(path_.empty() ? fmt::format("{}: {}", *file_, what) : fmt::format("{}: field '{}' {}", *file_, path_, what));
}

JsonField JsonField::operator[](const char* key) const {
  const std::string path = path_.empty() ? key : fmt::format("{}.{}", path_, key);
  require(value_->is_object(), "is no object");
  const auto found = value_->find(key);
  if (found == value_->end()) throw InputError(fmt::format("{}: field '{}' is missing", *file_, path));
  return {*file_, *found, path};
}

bool JsonField::has(const char* key) const { return value_->contains(key); }

std::size_t JsonField::size() const {
  require(value_->is_array(), "is no list");
  return value_->size();
}

JsonField JsonField::at(std::size_t index) const { return {*file_, (*value_)[index], fmt::format("{}[{}]", path_, index)}; }

std::vector<JsonField> JsonField::elements() const {
  std::vector<JsonField> all;
  for (std::size_t i = 0; i < size(); ++i) all.push_back(at(i));
  return all;
}

std::string JsonField::text() const {
  require(value_->is_string(), "is no text");
  return value_->get<std::string>();
}

std::int64_t JsonField::count() const {
  constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!value_->is_number_unsigned() || value_->get<std::uint64_t>() > kMost)
    refuse(fmt::format("is {}, not a whole number from 0 on", value_->dump()));
  return value_->get<std::int64_t>();
}

double JsonField::amount() const {
  if (!value_->is_number() || !std::isfinite(value_->get<double>()) || value_->get<double>() < 0)
    refuse(fmt::format("is {}, not a finite number from 0 on", value_->dump()));
  return value_->get<double>();
}

Hash128 JsonField::hash() const {
  try {
    return parse_hash128(text());
  } catch (const InputError&) {
    refuse(fmt::format("is {}, not 32 hexadecimal digits", value_->dump()));
  }
}

double JsonField::number() const {
  if (value_->is_number()) return value_->get<double>();
  if (*value_ == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (*value_ == "inf") return std::numeric_limits<double>::infinity();
  if (*value_ == "-inf") return -std::numeric_limits<double>::infinity();
  refuse(fmt::format(R"(is {}, not a number, "nan", "inf" or "-inf")", value_->dump()));
}

void JsonField::require_format(const std::string& format, std::int64_t version) const {
  const JsonField found = (*this)["format"];
  if (found.text() != format) found.refuse(fmt::format("is '{}', not '{}'", found.text(), format));
  const JsonField number = (*this)["version"];
  if (number.count() != version) number.refuse(fmt::format("is {}, this program reads version {}", number.count(), version));
}

nlohmann::json parse_json_object(const std::string& text, const std::string& file) {
  if (text.empty()) throw InputError(fmt::format("{} is empty; a JSON object is needed", file));
  try {
    nlohmann::json parsed = nlohmann::json::parse(text);
    if (parsed.is_object()) return parsed;
  } catch (const nlohmann::json::parse_error& error) {
    throw InputError(fmt::format("{}: not JSON at byte {} of {}: truncated or damaged", file, error.byte, text.size()));
  } catch (const nlohmann::json::exception& error) {  // a number too large for a double
    throw InputError(fmt::format("{}: {}", file, error.what()));
  }
  throw InputError(fmt::format("{}: not a JSON object", file));
}

nlohmann::ordered_json number_to_json(double value) {
  if (std::isfinite(value)) return value;
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

}  // namespace tandem

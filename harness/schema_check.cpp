// SPDX-License-Identifier: Apache-2.0
#include "harness/schema_check.h"

#include <fmt/format.h>
#include <rapidjson/document.h>
#include <rapidjson/pointer.h>
#include <rapidjson/schema.h>
#include <rapidjson/stringbuffer.h>

#include "core/error.h"

namespace tandem {
namespace {

std::string text_of(const rapidjson::Pointer& pointer) {
  rapidjson::StringBuffer buffer;
  pointer.Stringify(buffer);
  return buffer.GetString();
}

// The validator says that a key is missing, but not which.
std::string missing_key(const rapidjson::Value* object, const rapidjson::Value* rule) {
  if (object == nullptr || rule == nullptr || !object->IsObject() || !rule->IsObject() || !rule->HasMember("required"))
    return "?";
  for (const rapidjson::Value& key : (*rule)["required"].GetArray()) {
    if (!object->HasMember(key)) return key.GetString();
  }
  return "?";
}

std::string offence(std::string_view keyword, const std::string& field, const std::string& key) {
  if (keyword == "required") return fmt::format("{} is missing", field == "/" ? field + key : field + "/" + key);
  if (keyword == "type") return fmt::format("{} has the wrong type", field);
  if (keyword == "enum") return fmt::format("{} is not one of the allowed values", field);
  if (keyword == "additionalProperties") return fmt::format("{} is an unknown key, or holds one", field);
  if (keyword == "minimum") return fmt::format("{} is too small", field);
  return fmt::format("{} breaks the rule '{}'", field, keyword);
}

}  // namespace

std::optional<std::string> schema_offence(std::string_view text, std::string_view schema) {
  rapidjson::Document rules;
  rules.Parse(schema.data(), schema.size());
  TANDEM_CHECK(!rules.HasParseError(), "the schema is not valid JSON");
  rapidjson::Document document;
  document.Parse<rapidjson::kParseFullPrecisionFlag>(text.data(), text.size());
  if (document.HasParseError()) return fmt::format("/ cannot be parsed at byte {}", document.GetErrorOffset());

  const rapidjson::SchemaDocument compiled(rules);
  rapidjson::SchemaValidator validator(compiled);
  if (document.Accept(validator)) return std::nullopt;
  const rapidjson::Pointer at = validator.GetInvalidDocumentPointer();
  const std::string key = missing_key(at.Get(document), validator.GetInvalidSchemaPointer().Get(rules));
  const std::string field = text_of(at);
  return offence(validator.GetInvalidSchemaKeyword(), field.empty() ? "/" : field, key);
}

}  // namespace tandem
